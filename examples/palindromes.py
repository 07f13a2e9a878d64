"""The task of the jobs, a policy small enough to learn it on a CPU, and a supervised warm-up.

Letters in, a palindrome of them out, judged by the verifier of reasoning-gym.
"""

from __future__ import annotations

import math
import string
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count, islice
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.settings import JobSettings, ModelSettings, TaskSettings
from rollout import LLM, AsyncLLM, RolloutError, SamplingParams
from trainer_hooks import PromptItem, ThreadedLLM, WeightSync, evaluate, generation_phase
from trainer_hooks.prompt_sources import ReasoningGymPrompts

# Items of the dataset: far more per seed than a run needs, so that runs of other seeds share none.
ITEMS_PER_SEED = 1_000_000
MAX_SEEDS = 1_000
NUM_PROMPTS = 50_000  # of the training, and as many of the warm-up
END_TOKEN, PAD_TOKEN, UNKNOWN_TOKEN = "<end>", "<pad>", "<unknown>"
IGNORED = -100


class PalindromeTask:
    """Disjoint parts of one large dataset, its reward, and a tokenizer for it.

    reasoning-gym draws item i of a dataset with seed s from seed s + i, so two datasets with nearby
    seeds share items: there is one dataset here, cut into index ranges. Its first items are held
    out for evaluation. Training never sees their letters, in whatever order.
    """

    def __init__(self, settings: TaskSettings) -> None:
        self._items = ReasoningGymPrompts(
            "palindrome_generation",
            size=settings.num_held_out + MAX_SEEDS * ITEMS_PER_SEED,
            seed=settings.dataset_seed,
            min_length=settings.min_length,
            max_length=settings.max_length,
        )
        self.held_out = self._items[: settings.num_held_out]
        self._held_out_letters = {sorted_letters(item) for item in self.held_out}
        separator, first = ", ", self.held_out[0]
        instruction, _, _ = str(first.prompt).partition(separator.join(letters_of(first)))
        self.tokenizer = build_tokenizer([instruction, separator])

    def prompts(self, seed: int, is_warmup: bool = False) -> TrainingPrompts:
        """The training prompts of the run with `seed`, or those of its warm-up."""
        start = len(self.held_out) + seed * ITEMS_PER_SEED + is_warmup * ITEMS_PER_SEED // 2
        return TrainingPrompts(self._items, start, self._held_out_letters)

    def reward(
        self,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        entry: Sequence[Mapping[str, Any]],
    ) -> list[float | None]:
        """The verifier's score of each completion, in [0, 1]; None where nothing was generated."""
        return [
            self._items.dataset.score_answer(completion, entry=own) if ids else None
            for completion, ids, own in zip(completions, completion_ids, entry, strict=True)
        ]

    async def greedy_reward(
        self, llm: ThreadedLLM | AsyncLLM, params: SamplingParams
    ) -> dict[str, float]:
        """The mean reward of greedy answers to the held-out problems, as a metric."""
        greedy = replace(params, temperature=0.0, return_log_probs=False)
        metrics = await evaluate(llm, self.held_out, self.reward, greedy, tokenizer=self.tokenizer)
        return {"eval/greedy_reward": metrics["eval/reward"]}


class TrainingPrompts:
    """Prompts by number, made when they are asked for.

    An item with the letters of a held-out one is replaced by a spare item of its own.
    """

    def __init__(self, items: ReasoningGymPrompts, start: int, held_out: set[str]) -> None:
        self._items, self._start, self._held_out = items, start, held_out

    def __len__(self) -> int:
        """Number of prompts."""
        return NUM_PROMPTS

    def __getitem__(self, index: int) -> PromptItem:
        if not 0 <= index < NUM_PROMPTS:
            raise IndexError(f"prompt {index} of {NUM_PROMPTS}")
        place = self._start + index
        while sorted_letters(item := self._items[place]) in self._held_out:
            place += NUM_PROMPTS
        return item


def letters_of(item: PromptItem) -> list[str]:
    """The letters that the item gives."""
    return list(item.columns["entry"]["metadata"]["letters"])


def sorted_letters(item: PromptItem) -> str:
    """Equal for items that have the same letters."""
    return "".join(sorted(letters_of(item)))


def build_tokenizer(constant_parts: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token per character, and one for each constant part of a question."""
    tokens = [PAD_TOKEN, END_TOKEN, UNKNOWN_TOKEN, "\n", *string.ascii_lowercase]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in constant_parts])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        clean_up_tokenization_spaces=False,
    )


def build_policy(settings: ModelSettings, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A model with random weights, drawn from torch's generator."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            **asdict(settings),
            vocab_size=len(tokenizer),
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


async def warm_up(
    policy: PreTrainedModel, task: PalindromeTask, seed: int, job: JobSettings
) -> AsyncIterator[dict[str, float]]:
    """Train on the answers of the dataset until sampled answers score `job.warmup.target_reward`.

    GRPO needs some right answers among its samples to begin with. Yields the metrics of each step.
    The sampled reward is measured at the intervals that the settings name, and after the last step;
    the step that reaches the target measures the greedy reward as well.
    Raises RolloutError if `max_steps` do not reach the target.
    """
    settings, params = job.warmup, job.algorithm.sampling_params(task.tokenizer.eos_token_id)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate)
    source = task.prompts(seed, is_warmup=True)
    # A warm-up that has used all prompts begins with the first one again.
    prompts = (source[i % len(source)] for i in count())
    latest, start_s = -math.inf, time.perf_counter()
    with LLM(policy, task.tokenizer, job.engine) as llm:
        async with ThreadedLLM(llm) as threaded:
            for step in range(1, settings.max_steps + 1):
                loss = answer_loss(
                    policy, task.tokenizer, list(islice(prompts, settings.batch_size))
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                row = {"warmup/step": step, "warmup/loss": loss.item()}
                is_due = step >= settings.first_check and step % settings.check_interval == 0
                if is_due or step == settings.max_steps:
                    sampled = list(islice(prompts, settings.check_prompts))
                    async with generation_phase(threaded, WeightSync(threaded), policy):
                        metrics = await evaluate(threaded, sampled, task.reward, params)
                        row["warmup/reward"] = latest = metrics["eval/reward"]
                        if latest >= settings.target_reward:
                            row |= await task.greedy_reward(threaded, params)
                yield {**row, "timing_s/warmup": time.perf_counter() - start_s}
                if latest >= settings.target_reward:
                    return
    raise RolloutError(
        f"the warm-up reached a sampled reward of {latest:.3f} in {settings.max_steps} steps, not "
        f"warmup.target_reward={settings.target_reward}; raise warmup.max_steps or lower the target"
    )


def answer_loss(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, items: Sequence[PromptItem]
) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens, the end token included, given their questions.

    Shape letters: B problems, T positions, V vocabulary.
    """
    questions = [tokenizer.encode(item.prompt) for item in items]
    answers = [
        [*tokenizer.encode(item.columns["answer"]), tokenizer.eos_token_id] for item in items
    ]
    num_positions = max(map(len, questions)) + max(map(len, answers))
    tokens_BT = torch.full((len(items), num_positions), tokenizer.pad_token_id)
    targets_BT = torch.full((len(items), num_positions), IGNORED)
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        end = len(question) + len(answer)
        tokens_BT[row, :end] = torch.tensor(question + answer)
        targets_BT[row, len(question) : end] = torch.tensor(answer)
    # Padding is on the right, where no token of a causal model attends to it.
    logits_BTV = policy(input_ids=tokens_BT[:, :-1]).logits
    return cross_entropy(
        logits_BTV.flatten(0, 1), targets_BT[:, 1:].flatten(), ignore_index=IGNORED
    )
