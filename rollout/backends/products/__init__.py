"""Matrix products on a CPU: the ways to compute one, and which is the fastest on this machine."""
