"""The contract between scheduler and model executor: a StepPlan of integers in, a StepOutput of
sampled tokens out.

`rollout.scheduling` plans steps, `rollout.engine` runs them on an executor, and `rollout.worker`
and `rollout.backends` compute them.
"""
