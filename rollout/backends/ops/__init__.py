"""Device operations in plain torch: the reference, and what several backends share."""
