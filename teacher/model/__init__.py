"""The model's mathematics in MLX, its cache, and the same in plain NumPy F64."""
