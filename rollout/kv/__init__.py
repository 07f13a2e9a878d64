"""Where the KV bytes are: their arithmetic, and the tensors that hold them."""
