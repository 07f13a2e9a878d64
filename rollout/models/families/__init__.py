"""The model families: one file of values for each. `registry` lists them."""
