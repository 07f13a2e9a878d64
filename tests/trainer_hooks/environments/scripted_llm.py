"""ScriptedLLM: an asynchronous LLM whose texts a function computes from prompt and seed.

Used by the tests of environments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollout.requests import DynamicInferenceRequest, Status
from rollout.sampling_params import SamplingParams
from tests.trainer_hooks.environments.chat_tokenizer import chat_tokenizer
from tests.trainer_hooks.fakes import finished_request

PARAMS = SamplingParams(
    num_tokens_to_generate=400, return_log_probs=True, logprobs_mode="temperature"
)


class ScriptedLLM:
    """An LLM that answers `script(prompt text, seed)` and then ends its turn, unless the length
    limit cuts it.

    `holds`: while it is set, requests wait.
    """

    tokenizer = None
    weights_version = 0

    def __init__(self, script: Callable[[str, int], str]) -> None:
        self._script, self._tokenizer = script, chat_tokenizer()
        self.num_running = self.num_cancelled = 0
        self.is_free = asyncio.Event()
        self.is_free.set()

    async def generate(
        self, prompts: Any, sampling_params: SamplingParams | None = None, n: int = 1
    ) -> Any:
        params, prompt = sampling_params or PARAMS, list(prompts)
        assert n == 1
        self.num_running += 1
        try:
            await asyncio.sleep(0)
            await self.is_free.wait()
            return self._answer(prompt, params)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1

    def _answer(self, prompt: list[int], params: SamplingParams) -> DynamicInferenceRequest:
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        ids = self._tokenizer.encode(self._script(text, params.seed or 0))
        ids = [*ids, self._tokenizer.eos_token_id]
        limit = params.num_tokens_to_generate
        kept = ids if limit is None else ids[:limit]
        request = finished_request(
            prompt, kept, versions=[0] * len(kept), params=params, status=Status.COMPLETED
        )
        request.finish_reason = "stop" if len(kept) == len(ids) else "length"
        return request


def call(name: str, arguments: str = "{}") -> str:
    """Return the text of a tool call."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
