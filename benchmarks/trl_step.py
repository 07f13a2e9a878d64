"""CPU time of a step of TRL's GRPOTrainer that generates with this engine, or with TRL's own code.

    python benchmarks/trl_step.py [--rounds 6]

The trainer of examples/train_trl.py starts from the same warmed-up policy each time. A round runs
both kinds, one after the other; the ratio is taken within a round. Prints the medians as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from examples.train_trl import demo_settings, make_trainer, require_trl, warm_up_to_the_end
from rollout import LLM, ConfigError
from trainer_hooks.train.job import JobSettings
from trainer_hooks.train.task import Task
from trainer_hooks.trl_rollouts import TRLRollouts


def compare(settings: JobSettings, num_rounds: int, directory: Path) -> dict[str, float]:
    """Return the median CPU seconds of a step of each kind, and the median ratio.

    Both kinds use one thread, so on an idle machine a step takes as many seconds. The first step of
    each trainer, which also warms up, is left out. `directory`: for the trainer's files.
    """
    torch.manual_seed(settings.seed)
    torch.set_num_threads(settings.trainer.num_threads or torch.get_num_threads())
    task = Task(settings.model, settings.data, settings.reward)
    start = task.new_policy()
    asyncio.run(warm_up_to_the_end(start, task, settings))
    engine_s: list[float] = []
    built_in_s: list[float] = []
    with LLM(start, inference_config=settings.engine) as llm:
        for _ in range(num_rounds):
            for seconds, rollouts in ((engine_s, TRLRollouts(llm)), (built_in_s, None)):
                policy = copy.deepcopy(start)
                trainer = make_trainer(settings, task, policy, 2, rollouts, directory)
                seconds.append(second_step_s(trainer, settings.algorithm.num_minibatches))
    return {
        "step_cpu_s_engine": median(engine_s),
        "step_cpu_s_built_in": median(built_in_s),
        "built_in_over_engine": median(b / e for e, b in zip(engine_s, built_in_s, strict=True)),
    }


def second_step_s(trainer: Any, num_minibatches: int) -> float:
    """Train two steps. Returns the CPU seconds of the second one.

    `num_minibatches`: minibatches of a step; the trainer calls each of them a step.
    """
    from transformers import TrainerCallback

    at_s: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            at_s.append(time.process_time())

    trainer.add_callback(Clock())
    trainer.train()
    return at_s[-1] - at_s[num_minibatches - 1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    try:
        require_trl()
        with tempfile.TemporaryDirectory() as directory:
            figures = compare(demo_settings(), parser.parse_args().rounds, Path(directory))
        print(json.dumps(figures, indent=2))
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
