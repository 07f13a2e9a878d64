"""One update of a policy on a batch: forward passes, gradients, optimizer steps, the reference.

Used by users' training loops after `collate_rollouts`, and by `trainer_hooks.train`.
"""
