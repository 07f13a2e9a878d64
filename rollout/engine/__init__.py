"""The engine of one process: requests go in, the scheduler plans steps, the executor runs them."""
