"""Device operations in plain torch: the reference of `Ops`, and functions that several backends
share."""
