"""Attention over the paged KV cache, one file per implementation; each owns the cache's layout."""
