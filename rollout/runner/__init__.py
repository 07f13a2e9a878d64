"""From a StepPlan to a StepOutput, and from named tensors to new weights."""
