"""examples/train_grpo.py under torchrun: rank 0 trains, every other rank is an engine.

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint host1:29500 \\
        examples/multi_node/train.py launcher=torchrun num_engines=1 mode=async \\
        weight_transport=directory:/shared/weights

All settings are those of examples/train_grpo.py; num_engines is the number of ranks less one.
Without torchrun it is that program, and so it is with launcher=slurm or launcher=ray.
"""

from __future__ import annotations

import logging

from examples import train_grpo
from rollout.launch.torchrun import serve_engines


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    if serve_engines():
        return
    train_grpo.main()


if __name__ == "__main__":
    main()
