"""The parts of examples/train_grpo.py: task, model, warm-up, GRPO loop, summary."""
