"""One interface to every kind of LLM: LLM in process and over a fleet, AsyncLLM, ThreadedLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from rollout import LLM, AsyncLLM, DynamicInferenceRequest, SamplingParams
from rollout.apis.threaded_llm import ThreadedLLM

Request = DynamicInferenceRequest


class AnyLLM(Protocol):
    """`call(name, ...)` is the method of that name; `begin` and `finish` are `generate` in two."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any: ...

    def begin(self, prompts: Sequence[Any], params: SamplingParams, n: int) -> Any: ...

    def finish(self, begun: Any) -> list[Request]: ...

    @property
    def llm(self) -> LLM | AsyncLLM | ThreadedLLM: ...


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
    """An AsyncLLM or a ThreadedLLM, whose event loop runs while a method is called."""

    def __init__(self, make: Callable[[], AsyncLLM | ThreadedLLM]) -> None:
        self._loop = asyncio.new_event_loop()
        self.llm = make()
        self._do(self.llm.__aenter__())

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
        self._do(self.llm.__aexit__(None, None, None))
        self._loop.close()
