"""Which request holds which KV blocks and which row. Ids and counts only, no bytes."""
