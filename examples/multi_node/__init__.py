"""The demo's job with engines on other hosts, by torchrun, by Slurm, and by hand."""
