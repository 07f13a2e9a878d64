"""The engine's side of the fleet: the main loop of an engine process, and its work per message."""
