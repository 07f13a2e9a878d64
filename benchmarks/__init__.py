"""Benchmark programs, run by hand. They compare the engine with other engines and with hardware
limits."""
