"""The interface between scheduler and executor: StepPlan, StepOutput and random numbers.

`rollout.scheduling` plans steps, `rollout.engine` runs them on an executor, and `rollout.worker`
and `rollout.backends` compute them.
"""
