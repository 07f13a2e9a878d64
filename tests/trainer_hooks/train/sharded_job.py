"""The demo's job as a rank of torchrun, which compares the engines' weights with the policy.

Run by test_sharded_job; `num_kinds` is a reward function of other tests too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM

from tests.tiny_models import tiny_engine
from trainer_hooks import WeightSync, join_push
from trainer_hooks.train import learner
from trainer_hooks.train.command import run
from trainer_hooks.train.learner import Learner

push = Learner.push


def num_kinds(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Return the number of different letters per completion: a reward in which random answers
    differ.
    """
    return [float(len(set(completion))) for completion in completions]


def full_state(policy: Any) -> dict[str, Any]:
    return get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True))


async def compared_push(self: Learner, weight_sync: WeightSync, version: int) -> None:
    await push(self, weight_sync, version)
    whole = AutoModelForCausalLM.from_config(self.policy.config)
    whole.load_state_dict(full_state(self.policy))
    llm: Any = weight_sync._llm
    row = (
        version,
        await llm.weights_checksum(),
        tiny_engine(whole, max_sequence_length=64).weights_checksum(),
    )
    with Path(os.environ["CHECKSUMS"]).open("a") as file:
        print(json.dumps(row), file=file)


def compared_part(policy: Any) -> None:
    join_push(policy)
    full_state(policy)


if __name__ == "__main__":
    Learner.push = compared_push  # type: ignore[method-assign]
    learner.join_push = compared_part
    run(["--config-name", "demo", *sys.argv[1:]])
