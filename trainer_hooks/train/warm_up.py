"""Supervised warm-up of a policy, so that some sampled answers are right when GRPO begins.

Used by `trainer_hooks.train.main` before step 0, and by examples/train_trl.py. It trains the policy
in place, and runs an engine in this process.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from rollout import LLM, InferenceConfig, SamplingParams
from rollout.apis.threaded_llm import ThreadedLLM
from rollout.config import OWN_ENGINE
from rollout.errors import ConfigError
from rollout.step.seeds import mix_seed
from rollout.text import as_tokenizer, encode_prompt
from trainer_hooks.evaluation import evaluate
from trainer_hooks.phase import generation_phase
from trainer_hooks.prompts.ledger import PromptItem, PromptRows, as_prompt_item
from trainer_hooks.train.settings import WarmupSettings
from trainer_hooks.train.task import Task
from trainer_hooks.update.guarded_step import GuardedStep
from trainer_hooks.weight_sync import WeightSync

IGNORED = -100
# Larger than any supervised gradient, so nothing is clipped.
_MAX_GRAD_NORM = 1e3


async def warm_up(
    policy: PreTrainedModel,
    task: Task,
    seed: int,
    settings: WarmupSettings,
    params: SamplingParams,
    engine: InferenceConfig,
) -> AsyncIterator[dict[str, float]]:
    """Train on the answers of the warm-up's prompts until samples score `target_reward`.

    Yield the metrics of each step. An engine in this process samples with `params` at the settings'
    intervals and after the last step. Raises ConfigError if `max_steps` steps do not reach the
    target.
    """
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate)
    guard = GuardedStep(optimizer, _MAX_GRAD_NORM)
    source = task.warmup_prompts(seed)
    prompts = _in_turn(source)
    # In an environment the warm-up's prompts are parts of episodes, but whole episodes are scored.
    checked = prompts if task.rollout_fn is None else _in_turn(task.prompts(seed))
    latest, start_s = -math.inf, time.perf_counter()
    # Engines of other packages do not accept a model object.
    own = engine.replace(engine=OWN_ENGINE, engine_options={})
    with LLM(policy, task.tokenizer, own) as llm:
        async with ThreadedLLM(llm) as threaded:
            for step in range(1, settings.max_steps + 1):
                items = list(islice(prompts, settings.batch_size))
                loss = answer_loss(policy, task.tokenizer, items, settings.answer_column)
                optimizer.zero_grad()
                loss.backward()
                guard.step([policy])
                row = {"warmup/step": step, "warmup/loss": loss.item()}
                is_due = step >= settings.first_check and step % settings.check_interval == 0
                if is_due or step == settings.max_steps:
                    sampled = list(islice(checked, settings.check_prompts))
                    async with generation_phase(threaded, WeightSync(threaded), policy):
                        metrics = await evaluate(
                            threaded,
                            sampled,
                            task.reward,
                            replace(params, seed=mix_seed(seed, step)),
                            rollout_fn=task.rollout_fn,
                        )
                    row["warmup/reward"] = latest = metrics["eval/reward"]
                yield {**row, "timing_s/warmup": time.perf_counter() - start_s}
                if latest >= settings.target_reward:
                    return
    raise ConfigError(
        f"the warm-up reached a sampled reward of {latest:.3f} in {settings.max_steps} steps, not "
        f"warmup.target_reward={settings.target_reward}; raise warmup.max_steps or lower the target"
    )


def _in_turn(rows: PromptRows) -> Iterator[PromptItem]:
    """Yield all rows in order, again and again, without end."""
    return (as_prompt_item(rows[i % len(rows)]) for i in count())


def answer_loss(
    policy: PreTrainedModel,
    tokenizer: Any,
    items: Sequence[PromptItem],
    answer_column: str = "answer",
) -> torch.Tensor:
    """Return the mean cross-entropy of the answers' tokens after the prompts, end token included.
    Raises ConfigError for a prompt without an answer. Shape letters: B prompts, T positions, V
    vocabulary."""
    if missing := [item for item in items if answer_column not in item.columns]:
        raise ConfigError(
            f"the warm-up learns the column {answer_column!r}, but a prompt has "
            f"{', '.join(missing[0].columns) or 'no columns'}; set warmup.answer_column"
        )
    encodes = as_tokenizer(tokenizer)
    questions = [
        encode_prompt(encodes, item.prompt) if isinstance(item.prompt, str) else list(item.prompt)
        for item in items
    ]
    answers = [
        [*encodes.encode(str(item.columns[answer_column])), tokenizer.eos_token_id]
        for item in items
    ]
    num_positions = max(map(len, questions)) + max(map(len, answers))
    tokens_BT = torch.full((len(items), num_positions), tokenizer.pad_token_id)
    targets_BT = torch.full((len(items), num_positions), IGNORED)
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        end = len(question) + len(answer)
        tokens_BT[row, :end] = torch.tensor(question + answer)
        targets_BT[row, len(question) : end] = torch.tensor(answer)
    # No token of a causal model attends to padding on the right.
    logits_BTV = policy(input_ids=tokens_BT[:, :-1]).logits
    return cross_entropy(
        logits_BTV.flatten(0, 1), targets_BT[:, 1:].flatten(), ignore_index=IGNORED
    )
