"""Runnable jobs; each is one script, with a package of its parts beside it."""
