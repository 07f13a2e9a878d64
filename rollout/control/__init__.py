"""The control plane: the states of an engine, the commands that change them, and their reports."""
