"""Launchers start the engines of a fleet: on this machine, or through Ray, Slurm or torchrun."""
