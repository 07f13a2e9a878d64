"""The contract between scheduler and model executor: a StepPlan of integers in, a StepOutput of
sampled tokens out."""
