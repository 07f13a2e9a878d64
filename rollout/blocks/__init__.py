"""Allocation of KV blocks and rows to requests. Ids and counts only, no bytes."""
