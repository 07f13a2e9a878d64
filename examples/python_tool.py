"""A model learns to use a Python tool that runs programs in a sandbox. A minute or two on a CPU.

    python examples/python_tool.py

A small random model is asked for a sum, a difference or a product, and has a Python tool. Each of a
few programs is one token. Some programs loop for ever, take all memory, read the machine's files or
start processes without end. The sandbox stops or refuses these, without an effect on other
rollouts. With GRPO the model learns which program to run. docs/how-to/environment-packages.md says
what the sandbox protects against.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollout import LLM, InferenceConfig, SamplingParams
from trainer_hooks import (
    AsyncRolloutProducer,
    PolicyLossConfig,
    ThreadedLLM,
    UpdateSettings,
    WeightSync,
    group_advantages,
    update_policy,
)
from trainer_hooks.environments import EnvironmentRollouts, EpisodeLimits, ToolEnvironment, tool
from trainer_hooks.environments.python_tool import PythonLimits, PythonTool

TASKS = {"sum": "a + b", "difference": "a - b", "product": "a * b"}
BAD_PROGRAMS = (
    "while True: pass",
    "x = [0]\nwhile True: x = x * 2",
    "print(open('/etc/passwd').read())",
    "import os\nwhile True: os.fork()",
)
CHAT_TEMPLATE = """{% for message in messages %}{{ '<' + message.role + '>' + message.content }}
{%- if message.role != 'assistant' %}{{ '<end>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
GROUP_SIZE, BATCH_GROUPS = 8, 6
ENGINE = InferenceConfig(block_size_tokens=8, max_sequence_length=64, buffer_size_gb=0.02)
PYTHON = PythonLimits(cpu_s=1, memory_bytes=256 << 20)


class Calculation(ToolEnvironment):
    """One question about two numbers. Programs know them as `a` and `b`, and the model does not."""

    def __init__(self, python: PythonTool) -> None:
        self._python = python

    def reset(self, row: Mapping[str, Any]) -> None:
        self._numbers = f"a, b = {row['a']}, {row['b']}\n"
        self._answer = str(eval(TASKS[row["prompt"]], {"a": row["a"], "b": row["b"]}))
        self._ends: list[str] = []
        self._outputs: list[str] = []

    @tool
    async def python(self, code: str) -> str:
        """Run Python code, which knows the numbers a and b. Returns what it prints."""
        result = await self._python.run(self._numbers + code)
        self._outputs.append(result.output.strip())
        ok = "ran" if result.exit_status == 0 else "failed"
        self._ends.append("stopped" if result.stopped_by else ok)
        return str(result)

    def reward(self) -> Mapping[str, float]:
        """Return 0.2 if the first program ran to its end, and 0.8 if it printed the answer."""
        has_run = self._ends[:1] == ["ran"]
        return {"ran": 0.2 * has_run, "right": 0.8 * (self._outputs[:1] == [self._answer])}

    def state(self) -> Mapping[str, Any]:
        return {"programs": self._ends}


def call(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


def tiny_tokenizer() -> Any:
    """Return a tokenizer with one token for each program. All other text is the unknown token."""
    programs = [*(f"print({expression})" for expression in TASKS.values()), *BAD_PROGRAMS]
    made = Tokenizer(models.WordLevel({"<unknown>": 0}, unk_token="<unknown>"))
    made.decoder = decoders.Fuse()
    roles = ["<user>", "<tool>", "<assistant>", "<end>"]
    made.add_tokens([AddedToken(text, special=True, normalized=False) for text in roles])
    words = [*TASKS, "Done.", *map(call, programs)]
    made.add_tokens([AddedToken(text, normalized=False) for text in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", chat_template=CHAT_TEMPLATE
    )


def tiny_policy(tokenizer: Any, seed: int) -> Qwen3ForCausalLM:
    """Return a model with random weights drawn with `seed`."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    shape |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config = Qwen3Config(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **shape
    )
    return Qwen3ForCausalLM(config)


def questions(seed: int, count: int) -> list[dict[str, Any]]:
    """Return rows with two numbers, which ask in turn for a sum, a difference and a product."""
    numbers = random.Random(seed)
    return [
        {
            "prompt": list(TASKS)[i % len(TASKS)],
            "a": numbers.randint(3, 99),
            "b": numbers.randint(3, 99),
        }
        for i in range(count)
    ]


async def train(seed: int = 0, num_steps: int = 20) -> list[float]:
    """Train `num_steps` steps and print what the programs did. Returns the reward of each step."""
    tokenizer = tiny_tokenizer()
    policy = tiny_policy(tokenizer, seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)
    calls = [token_id for text, token_id in tokenizer.get_vocab().items() if "python" in text]
    params = SamplingParams(
        num_tokens_to_generate=3,
        stop_token_ids=calls,  # a turn ends with its call
        return_log_probs=True,
        logprobs_mode="temperature",
    )
    make = functools.partial(Calculation, PythonTool(PYTHON, num_processes=2))
    rewards = []
    with LLM(policy, tokenizer, ENGINE) as direct:
        async with (
            ThreadedLLM(direct) as llm,
            EnvironmentRollouts(make, tokenizer, EpisodeLimits(max_turns=1)) as rollout_fn,
            AsyncRolloutProducer(
                llm,
                questions(seed, 48),
                None,  # the environment has the reward
                GROUP_SIZE,
                BATCH_GROUPS,
                max_staleness_versions=1,
                rollout_fn=rollout_fn,
                sampling_params=params,
                seed=seed,
            ) as producer,
        ):
            weight_sync = WeightSync(llm, in_flight=True)
            for step in range(num_steps):
                batch = await anext(producer)
                rows = batch.rollouts
                advantages_PG = group_advantages(rows.rewards_R.view(-1, GROUP_SIZE))
                columns = {"advantages_BT": rows.per_row(advantages_PG).view(-1, 1)}
                update_policy(
                    policy, optimizer, rows, columns, PolicyLossConfig(), UpdateSettings()
                )
                await weight_sync.apush(policy)
                rewards.append(float(rows.rewards_R.nanmean()))
                print(f"step {step}  reward {rewards[-1]:.2f}  programs {_ends(batch)}")
    return rewards


def _ends(batch: Any) -> str:
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    ends = Counter(end for r in rollouts for end in r.state["environment"]["programs"])
    return ", ".join(f"{ends[end]} {end}" for end in ("ran", "failed", "stopped"))


if __name__ == "__main__":
    asyncio.run(train())
