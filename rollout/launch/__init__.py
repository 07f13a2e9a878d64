"""Where the engines of a fleet run, and what starts them again."""
