"""Which engine gets which request, and the bounded memory of who holds which prefix."""
