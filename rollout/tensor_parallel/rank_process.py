"""The program of a rank other than 0 as a child of rank 0's process: `python -m
rollout.tensor_parallel.rank_process --child`."""

from rollout.child_process import run_child
from rollout.tensor_parallel.start import run_rank

if __name__ == "__main__":
    run_child(run_rank)
