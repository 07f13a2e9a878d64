"""Matrix products on a CPU: the ways to compute one, and the choice of the fastest."""
