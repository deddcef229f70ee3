"""What was measured and decided, for people and for programs."""
