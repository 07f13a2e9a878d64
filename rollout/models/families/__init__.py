"""Model families: one file with a Family of each; `registry` finds them by `model_type`."""
