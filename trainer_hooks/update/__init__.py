"""One update of a policy on a batch: forward passes, gradients, optimizer steps, the reference.

Used by a training loop after `collate_rollouts`, and by the job `trainer_hooks.train`.
"""
