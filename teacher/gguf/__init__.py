"""The GGUF: read as hostile, held against the snapshot, its weights in the snapshot's layout."""
