"""The coordinator's decisions: it takes and returns messages, without socket, clock or thread."""
