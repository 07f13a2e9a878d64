"""BatchedReward and RewardModel: reward functions that score several groups in one batch.

Used by users' training loops and job configs, as the function of a RewardRunner. Batches are scored
in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rollout.errors import ConfigError
from rollout.extras import extra_needed
from trainer_hooks.pretrained import load_pretrained
from trainer_hooks.rewards.processes import in_thread

Score = Callable[[list[str], list[str]], Sequence[float]]


class BatchedReward:
    """Collects the samples of concurrent calls and scores them in batches of up to `batch_size`.

    A batch is scored by one call `score(prompts, completions)` in a thread. New calls meanwhile
    wait for the next batch. An instance serves one event loop.
    Raises ConfigError for a `batch_size` below 1.
    """

    def __init__(self, score: Score, batch_size: int) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} must be at least 1")
        self._score, self._batch_size = score, batch_size
        self._waiting: list[tuple[str, str, asyncio.Future[float]]] = []
        self._lock = asyncio.Lock()

    async def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """Return one number per completion.

        Raises ConfigError if `score` did not return one number per sample of a batch. Each call
        that has a sample in a batch raises the error that `score` raised for it.
        """
        loop = asyncio.get_running_loop()
        own: list[asyncio.Future[float]] = [loop.create_future() for _ in completions]
        self._waiting += zip(prompts, completions, own, strict=True)
        try:
            while not all(future.done() for future in own):
                async with self._lock:
                    if not all(future.done() for future in own):
                        await self._score_next()
            return [future.result() for future in own]
        finally:
            self._waiting = [item for item in self._waiting if item[2] not in own]
            for future in own:
                future.cancel()

    async def _score_next(self) -> None:
        batch, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
        prompts, completions = [item[0] for item in batch], [item[1] for item in batch]
        futures = [item[2] for item in batch]
        try:
            scores = await in_thread(lambda: list(self._score(prompts, completions)))
            if len(scores) != len(batch):
                raise ConfigError(f"{len(scores)} scores for a batch of {len(batch)} completions")
        except asyncio.CancelledError:  # other callers of the batch still wait
            self._waiting = batch + self._waiting
            raise
        except Exception as error:  # `score` may raise anything, for each caller
            for future in futures:
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # marks it as retrieved: a caller raises one sample's error
            return
        for future, score in zip(futures, scores, strict=True):
            if not future.done():  # its caller was cancelled
                future.set_result(float(score))


class RewardModel(BatchedReward):
    """Scores completions by a transformers sequence-classification model with one label.

    The model reads each prompt's text followed by the completion's.
    `path`: Hugging Face directory with the model and its tokenizer.
    `max_tokens`: longer texts lose their beginning. None cuts no text.
    Raises ConfigError unless `path` has a tokenizer and a model with one label.
    """

    def __init__(self, path: str, batch_size: int = 16, max_tokens: int | None = None) -> None:
        with extra_needed("hf", "RewardModel"):
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        super().__init__(self._logits, batch_size)
        where = ("path of the reward model", path)
        self._tokenizer: Any = load_pretrained(AutoTokenizer, *where, truncation_side="left")
        self._model: Any = load_pretrained(AutoModelForSequenceClassification, *where).eval()
        self._max_tokens = max_tokens
        if self._model.config.num_labels != 1:
            raise ConfigError(
                f"{path} has {self._model.config.num_labels} labels; a reward model has one"
            )
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model.config.pad_token_id = self._tokenizer.pad_token_id

    @torch.no_grad()
    def _logits(self, prompts: list[str], completions: list[str]) -> list[float]:
        encoded = self._tokenizer(
            [prompt + text for prompt, text in zip(prompts, completions, strict=True)],
            padding=True,
            truncation=self._max_tokens is not None,
            max_length=self._max_tokens,
            add_special_tokens=False,
            return_tensors="pt",
        )
        names = ("input_ids", "attention_mask")
        scores: list[float] = self._model(**{n: encoded[n] for n in names}).logits[:, 0].tolist()
        return scores
