"""Allocation of KV blocks and rows to requests, as ids and counts; the bytes are the worker's."""
