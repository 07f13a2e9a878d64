"""A tiny random model with a server, in an event loop on its own thread."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from rollout import LLM, InferenceConfig, ServeConfig
from rollout.apis.serving import Serving
from rollout.apis.threaded_llm import ThreadedLLM
from tests.apis.fleets import directory

CONFIG = InferenceConfig(
    block_size_tokens=8,
    max_sequence_length=512,
    buffer_size_gb=0.02,
    num_threads=1,
    materialize_only_last_token_logits=False,
)
DEADLINE_S = 120.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """status, the headers, and the body as bytes."""

    status: int
    headers: Any
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class OwnEngine(ThreadedLLM):
    """An LLM of this process that is served as an AsyncLLM is; its arguments are those of LLM."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(LLM(*arguments))
        self.serving = Serving(self)

    async def serve(self, config: ServeConfig, *, blocking: bool) -> None:
        await self.serving.start(config, blocking=blocking)

    async def stop_serving(self, drain_timeout_s: float | None = None) -> None:
        await self.serving.stop(drain_timeout_s)

    async def shutdown(self) -> None:
        await self.stop_serving(0.0)
        await self.aclose()
        self._llm.shutdown()

    def has_unfinished(self) -> bool:
        return bool(self._unfinished())


class Served:
    """`llm` serves at `url` until `close`. `do` runs a coroutine in its event loop."""

    def __init__(self, make_llm: Callable[[], Any], config: ServeConfig | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.llm: Any = make_llm()
        self.do(self.llm.serve(config or ServeConfig(port=0), blocking=False))
        address = self.llm.serving.address
        assert address is not None
        self.host, self.port = address
        self.url = f"http://{self.host}:{self.port}"

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def close(self) -> None:
        self.do(self.llm.shutdown())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """An HTTP request. `body`: bytes, or what is sent as JSON."""
        sent = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path,
            sent,
            {"Content-Type": "application/json", **(headers or {})},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
                return Answer(response.status, response.headers, response.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, error.read())

    def get(self, path: str, **headers: str) -> Answer:
        return self.call("GET", path, headers=headers)

    def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        return self.call("POST", path, body if body is not None else {}, headers=headers)

    def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream, which must end with [DONE]."""
        answer = self.post(path, body)
        assert answer.status == 200, answer.body
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        *events, last, rest = answer.body.decode().split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def completed(self, path: str, body: dict[str, Any]) -> tuple[list[Any], Any]:
        """(choices, usage) of a completion; the chunks of a stream are joined."""
        if not body.get("stream"):
            answer = self.post(path, body)
            assert answer.status == 200, answer.body
            return answer.json()["choices"], answer.json()["usage"]
        choices: dict[int, Any] = {}
        events = self.events(path, body)
        for event in events:
            for chunk in event["choices"]:
                if chunk["index"] not in choices:
                    choices[chunk["index"]] = chunk
                    continue
                known = choices[chunk["index"]]
                known["text"] += chunk["text"]
                for name in {"token_ids"} & set(chunk):
                    known[name] += chunk[name]
                for name, column in (chunk["logprobs"] or {}).items():
                    known["logprobs"][name] += column
                ending = set(chunk) - set(known) | {"finish_reason", "stop_reason"}
                known |= {name: chunk[name] for name in ending}
        return [choices[index] for index in sorted(choices)], events[-1].get("usage")


def served_directory(config: ServeConfig | None = None, tokenizer: Any = None) -> Served:
    """The tiny model of `tests.apis.fleets`, in an engine of this process."""
    return Served(lambda: OwnEngine(directory(), tokenizer, CONFIG), config)
