"""Control calls: the states of an engine, the commands that lead between them, their reports."""
