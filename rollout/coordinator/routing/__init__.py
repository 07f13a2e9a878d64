"""Routing policies choose the engine of each request, by load and by assigned prefixes."""
