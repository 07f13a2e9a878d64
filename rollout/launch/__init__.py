"""Launchers start and restart the engines of a fleet: here, or on Ray, Slurm or torchrun."""
