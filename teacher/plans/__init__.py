"""What is run: examples, the calls they are cut into, and the built-in plan."""
