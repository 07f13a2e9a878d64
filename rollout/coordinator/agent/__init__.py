"""The engine's side of a fleet: the main loop of an engine, and its handling of messages."""
