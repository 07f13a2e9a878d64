"""One face for LLM in process, LLM over engine processes, and AsyncLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from rollout import LLM, AsyncLLM, DynamicInferenceRequest, SamplingParams

Request = DynamicInferenceRequest


class AnyLLM(Protocol):
    """`call(name, ...)` is the method of that name; `begin` and `finish` are `generate` in two."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any: ...

    def begin(self, prompts: Sequence[Any], params: SamplingParams, n: int) -> Any: ...

    def finish(self, begun: Any) -> list[Request]: ...

    @property
    def llm(self) -> LLM | AsyncLLM: ...


class ThreadsLLM:
    """An LLM."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.llm, method)(*args, **kwargs)

    def begin(self, prompts: Sequence[Any], params: SamplingParams, n: int) -> Any:
        ids = self.llm.submit(prompts, params, n)
        self.llm.collect(0)
        return ids

    def finish(self, begun: Any) -> list[Request]:
        groups = {group.group_id: group.requests for group in self.llm.collect()}
        return [request for group_id in begun for request in groups.pop(group_id)]

    def close(self) -> None:
        self.llm.shutdown()


class CoroutinesLLM:
    """An AsyncLLM, whose event loop runs while it is asked."""

    def __init__(self, make: Callable[[], AsyncLLM]) -> None:
        self._loop = asyncio.new_event_loop()
        self.llm = make()
        self._do(self.llm.start())

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, 120))

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._do(getattr(self.llm, method)(*args, **kwargs))

    def begin(self, prompts: Sequence[Any], params: SamplingParams, n: int) -> Any:
        task = self._loop.create_task(self.llm.generate(prompts, params, n))
        self._do(asyncio.sleep(0.01))
        return task

    def finish(self, begun: Any) -> list[Request]:
        async def result() -> list[Request]:
            return list(await begun)

        return self._do(result())

    def close(self) -> None:
        self._do(self.llm.shutdown())
        self._loop.close()
