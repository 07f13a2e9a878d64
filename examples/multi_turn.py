"""Training on rollouts of several turns with a tool. Half a minute on a CPU.

    python examples/multi_turn.py

A small random model is asked products such as "7*12=". A turn ends when it samples "!". A
calculator then answers the last sum or product in the text, and the model continues from all tokens
so far. The calculator's answer is appended as tokens. Sampled tokens are never decoded and encoded
again, because "1" "2" would become one token "12", which the model did not choose. Each batch is
checked: the mask covers exactly the sampled tokens, and the trainer's log-probs equal the engine's.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout import LLM, DynamicInferenceRequest, InferenceConfig, SamplingParams
from trainer_hooks import (
    AsyncRolloutProducer,
    RolloutLLM,
    ThreadedLLM,
    TrainingBatch,
    WeightSync,
    group_advantages,
    policy_loss,
    token_logprobs,
)

CALL = "!"  # token with which the model calls the calculator
GROUP_SIZE, BATCH_GROUPS, NUM_STEPS, MAX_TURNS = 4, 4, 3, 3
PARAMS = SamplingParams(
    num_tokens_to_generate=16, return_log_probs=True, logprobs_mode="temperature"
)
ENGINE = InferenceConfig(block_size_tokens=8, max_sequence_length=256, buffer_size_gb=0.02)


class SumTokenizer:
    """One token per character and per number from 10 to 19, so texts have several encodings.

    The end token is CALL.
    """

    bos_id = None

    def __init__(self) -> None:
        self.texts = [*"0123456789+*=<>?", CALL, *(str(n) for n in range(10, 20))]
        self._ids = {text: token_id for token_id, text in enumerate(self.texts)}
        self.eos_id = self._ids[CALL]
        self.vocab_size = len(self.texts)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with two-digit tokens where possible."""
        return [self._ids[part] for part in re.findall(r"1\d|.", text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.texts[token_id] for token_id in ids)


def calculator(text: str) -> str:
    """Return the value of the last sum or product in `text` as "<value>", or "<?>" without one."""
    sums = re.findall(r"(\d{1,4})([+*])(\d{1,4})", text)
    if not sums:
        return "<?>"
    left, operator, right = sums[-1]
    value = int(left) + int(right) if operator == "+" else int(left) * int(right)
    return f"<{value}>"


async def use_the_tool(llm: RolloutLLM, prompt: Sequence[int]) -> list[DynamicInferenceRequest]:
    """Sample the turns of one rollout, until a turn ends without a call or there are MAX_TURNS."""
    assert llm.tokenizer is not None
    context = list(prompt)
    turns: list[DynamicInferenceRequest] = []
    while len(turns) < MAX_TURNS:
        turn = await llm.generate(context)
        turns.append(turn)
        context += turn.generated_tokens
        if turn.finish_reason != "stop":
            break
        # The tool reads text. The context stays tokens.
        context += llm.tokenizer.encode(calculator(llm.tokenizer.decode(context)))
    return turns


def reward(completions: Sequence[str], answer: Sequence[int]) -> list[float]:
    """Return 1 for a completion with the answer, plus 0.1 for each call that the tool answered."""
    return [
        float(str(wanted) in re.split(r"\D+", text)) + 0.1 * len(re.findall(r"<\d+>", text))
        for text, wanted in zip(completions, answer, strict=True)
    ]


def problems(tokenizer: SumTokenizer, count: int) -> list[dict[str, Any]]:
    """Return `count` rows, each a product with its prompt as token ids and its answer."""
    numbers = random.Random(0)
    pairs = [(numbers.randrange(20), numbers.randrange(20)) for _ in range(count)]
    return [{"prompt": tokenizer.encode(f"{a}*{b}="), "answer": a * b} for a, b in pairs]


def check(batch: TrainingBatch, logprobs_BT: torch.Tensor) -> str:
    """Assert that the mask and log-probs of a batch are right. Returns a text with token counts."""
    rows = batch.rollouts
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    for i, rollout in enumerate(rollouts):
        assert rows.tokens_BT[i][rows.mask_BT[i]].tolist() == rollout.generated_ids
    # Tokens that the trained weights sampled, on KV that these weights wrote.
    fresh_BT = rows.mask_BT & (rows.policy_lag_BT == 0) & (rows.kv_lag_BT == 0)
    gaps = (logprobs_BT - rows.behaviour_logprobs_BT)[fresh_BT].abs()
    assert bool((gaps < 1e-3).all()), f"the trainer's log-probs differ by {gaps.max()}"
    num_tool = int((rows.attention_mask_BT & ~rows.mask_BT).sum() - rows.prompt_lengths_B.sum())
    return (
        f"{int(rows.mask_BT.sum())} sampled tokens masked in, {num_tool} tool tokens out; "
        f"log-probs of {len(gaps)} tokens of version {batch.version} are the engine's"
    )


def tiny_policy(tokenizer: SumTokenizer) -> Qwen3ForCausalLM:
    """Return a model with random weights, the same ones in each call."""
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    shape |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.15)
    config = Qwen3Config(vocab_size=tokenizer.vocab_size, eos_token_id=None, **shape)
    return Qwen3ForCausalLM(config)


async def train() -> None:
    """Train NUM_STEPS steps and print each. The engine generates while the trainer computes."""
    tokenizer = SumTokenizer()
    policy = tiny_policy(tokenizer)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    with LLM(policy, tokenizer, ENGINE) as direct:
        async with (
            ThreadedLLM(direct) as llm,
            AsyncRolloutProducer(
                llm,
                problems(tokenizer, 64),
                reward,
                GROUP_SIZE,
                BATCH_GROUPS,
                max_staleness_versions=1,
                rollout_fn=use_the_tool,
                sampling_params=PARAMS,
            ) as producer,
        ):
            weight_sync = WeightSync(llm, in_flight=True)
            for _ in range(NUM_STEPS):
                batch = await anext(producer)
                rows = batch.rollouts
                logprobs_BT = token_logprobs(policy(rows.tokens_BT).logits, rows.tokens_BT)
                print(f"batch {batch.index}: trained at version {batch.version}")
                for rollout in batch.groups[0].rollouts:
                    text = tokenizer.decode(rollout.tokens_T.tolist())
                    print(f"  {len(rollout.requests)} turns  {text}")
                print(f"  checked: {check(batch, logprobs_BT.detach())}")
                advantages_PG = group_advantages(rows.rewards_B.view(-1, GROUP_SIZE))
                loss, _ = policy_loss(
                    logprobs_BT, rows.behaviour_logprobs_BT, advantages_PG.view(-1, 1), rows.mask_BT
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(f"  reward {rows.rewards_B.nanmean():.3f}  loss {loss.item():+.4f}")
                await weight_sync.apush(policy)


if __name__ == "__main__":
    asyncio.run(train())
