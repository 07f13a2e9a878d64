"""How buffers are reserved, given back to the system and brought again."""
