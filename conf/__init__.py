"""Hydra config groups of the runnable jobs; each YAML leaf maps onto one frozen dataclass."""
