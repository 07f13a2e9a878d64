"""The control plane: an engine's states, the commands that change them, and the results' types."""
