"""A GGUF's tensors against the snapshot's, without a forward pass."""
