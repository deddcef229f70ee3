"""Who takes part in a verification."""
