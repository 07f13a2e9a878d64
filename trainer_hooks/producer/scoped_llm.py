"""ScopedLLM: what a rollout function generates with, one for each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rollout.errors import ConfigError
from rollout.requests import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.step.seeds import mix_seed
from rollout.text import Tokenizer, as_tokenizer
from trainer_hooks.prompt_ledger import PromptItem


class GeneratesAsync(Protocol):
    """The part of AsyncLLM that a producer uses. Cancelling `generate` aborts its requests."""

    @property
    def weights_version(self) -> int: ...

    async def generate(
        self, prompts: Any, sampling_params: SamplingParams | None = None, n: int = 1
    ) -> Any: ...


class ScopedLLM:
    """Generates turns of one sample, with the producer's sampling and a seed for each turn.

    `tokenizer`: for text that a tool adds; what was generated is never to be decoded and encoded.
    """

    def __init__(
        self,
        llm: GeneratesAsync,
        sampling_params: SamplingParams,
        item: PromptItem,
        sample_index: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        """The seed of `sampling_params` is that of the group."""
        self._llm = llm
        self.sampling_params = sampling_params
        self.item, self.sample_index, self.tokenizer = item, sample_index, tokenizer
        self._num_turns = 0

    @property
    def columns(self) -> Mapping[str, Any]:
        """The other columns of the prompt's row."""
        return self.item.columns

    async def generate(self, token_ids: Sequence[int], **changes: Any) -> DynamicInferenceRequest:
        """One turn on the context `token_ids`; `changes` are fields of SamplingParams.

        Raises ConfigError for an empty context.
        """
        if not len(token_ids):
            raise ConfigError("a turn needs a context of at least one token")
        seed = mix_seed(self.sampling_params.seed or 0, self.sample_index, self._num_turns)
        self._num_turns += 1
        params = replace(self.sampling_params, **{"seed": seed, **changes})
        request: DynamicInferenceRequest = await self._llm.generate(token_ids, params)
        return request


def tokenizer_for(llm: GeneratesAsync, tokenizer: Any | None) -> Tokenizer | None:
    """`tokenizer`, or else that of the llm. Raises TypeError for something else."""
    source = getattr(llm, "tokenizer", None) if tokenizer is None else tokenizer
    return None if source is None else as_tokenizer(source)


def encoded_for(llm: GeneratesAsync, prompt: Any, tokenizer: Tokenizer | None) -> Any:
    """`prompt` as `llm` takes it: text stays text only where the llm has a tokenizer of its own."""
    takes_text = getattr(llm, "tokenizer", None) is not None
    if isinstance(prompt, str) and not takes_text and tokenizer is not None:
        return tokenizer.encode(prompt)
    return prompt
