"""`python -m rollout.tensor_parallel.rank_process --child`: runs a rank other than 0.

Started by `rollout.tensor_parallel.start` as a child process of rank 0.
"""

from rollout.child_process import run_child
from rollout.tensor_parallel.start import run_rank

if __name__ == "__main__":
    run_child(run_rank)
