"""The model as released: its folder, its tensors and its tokenizer."""
