"""The program of a child process that runs a rank other than 0: `python -m
rollout.tensor_parallel.rank_process --child`. Started by `rollout.tensor_parallel.start`."""

from rollout.child_process import run_child
from rollout.tensor_parallel.start import run_rank

if __name__ == "__main__":
    run_child(run_rank)
