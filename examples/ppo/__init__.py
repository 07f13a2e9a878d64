"""The parts of examples/train_ppo.py that GRPO does not have: the critic and its learner."""
