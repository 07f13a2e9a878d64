"""How a forward pass is run: eagerly, compiled, or replayed from a captured graph."""
