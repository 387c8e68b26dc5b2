"""Where states live: what a layer's state is (spec), the tensors (pool), and who holds which (alloc)."""
