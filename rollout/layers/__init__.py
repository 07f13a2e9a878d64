"""The building blocks of a decoder: modules whose arithmetic is done by a bound backend."""
