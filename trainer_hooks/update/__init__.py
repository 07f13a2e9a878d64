"""One update of the policy on a batch: micro-batches, gradients, optimizer steps, the reference."""
