"""Runs models: the BF16 source-teacher, its PyTorch reference, and the engines under audit."""
