"""Routing policies: which engine gets which request, by load and by assigned prefixes."""
