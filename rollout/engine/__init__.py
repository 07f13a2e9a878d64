"""The engine: requests go in, the scheduler plans steps, the executor runs them."""
