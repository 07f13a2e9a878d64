"""Who holds which KV block and which row: ids and counts only, no bytes."""
