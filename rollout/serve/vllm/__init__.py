"""vLLM's routes for trainers: pause, sleep and weight transfer."""
