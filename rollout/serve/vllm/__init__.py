"""vLLM's routes for trainers: pause, sleep and weight transfer. Used by `rollout.serve.app`."""
