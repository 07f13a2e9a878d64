"""Running a step: EagerExecutor, and the copies between host and device that executors share."""
