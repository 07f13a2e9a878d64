"""What generation costs, against a peer and against the bare matrix products of the model."""
