"""KV blocks and rows: which request holds which. Ids and counts only, no bytes."""
