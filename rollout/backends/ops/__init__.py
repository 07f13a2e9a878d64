"""Device operations in plain torch: the reference of `Ops`, and what several backends share."""
