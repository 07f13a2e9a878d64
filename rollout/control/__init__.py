"""The control plane: engine states, the commands that change them, and the reports of commands."""
