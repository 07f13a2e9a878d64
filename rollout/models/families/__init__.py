"""Model families: one file with a Family each. `registry` finds a Family by `model_type`."""
