"""How calls are run: one session over one cache, and the layer-major replay."""
