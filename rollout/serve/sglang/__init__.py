"""SGLang's routes for trainers, and its /generate. Used by `rollout.serve.app`."""
