"""Several ranks that run one engine: sums over them, and what rank 0 has the others do."""
