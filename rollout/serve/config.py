"""ServeConfig: a server's address, keys, protocols and limits.

Users pass it to LLM.serve and AsyncLLM.serve (`rollout.apis`); `rollout.cli.serve` reads its fields
as settings. `rollout.serve` reads it and never changes it. The script http_fields reads PROTOCOLS.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated

from rollout.errors import ConfigError
from rollout.keyword_hints import renamed_keywords
from rollout.ranges import (
    Choices,
    Interval,
    Name,
    NonNegativeInt,
    NonNegativeSeconds,
    PositiveInt,
    check_fields,
)
from rollout.sampling_params import LOGPROBS_MODES
from rollout.serve.generation_config import GENERATION_CONFIGS
from rollout.tool_calls import REASONING_PARSERS, TOOL_CALL_PARSERS

PROTOCOLS = ("openai", "vllm", "sglang")
CONTROL_PROTOCOLS = ("vllm", "sglang")


@renamed_keywords({"doors": "protocols"})
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Config of one server. Raises ConfigError, which names the field, the value and the remedy.

    host: address to listen at. Off loopback, keys are required.
    port: port to listen at; 0 takes a free one.
    api_key: key that clients send as `Authorization: Bearer KEY` to generate. None: no key is
        needed. Other users can read command lines: set ROLLOUT_API_KEY instead.
    admin_key: key for the routes that pause, update and abort. It also opens all other routes.
        Environment variable: ROLLOUT_ADMIN_KEY.
    allowed_hosts: further names of the server, such as a proxy's. Requests with another Host, and
        requests of other sites' pages (Origin), are refused. If empty, every Host is accepted off
        loopback, where keys are required.
    protocols: protocols to serve: openai (completions, chat, tokens in and out), vllm and sglang
        (their control routes, and SGLang's generate).
    served_model_name: name of the model for clients. None: the name of its directory.
    chat_template: file with the Jinja template of chats, or its text. None: the model's own.
    trust_request_chat_template: whether a request may have a template of its own, which runs in a
        sandbox without a time limit.
    tool_call_parser: format in which the model writes tool calls. "auto": the format in its chat
        template. "none": tool calls are not parsed.
    reasoning_parser: tags around the model's thoughts, which chats return as `reasoning`. "auto":
        the tags in the chat template. "none": thoughts stay in the content.
    logprobs_mode: kind of log-probs in the openai protocol; see SamplingParams.
    generation_config: defaults of sampling fields in the openai protocol. "vllm": neutral
        (temperature 1, no truncation, no penalty), so that a request without top_k draws from the
        whole distribution, as trainers assume. "auto": the model's generation_config.json, which
        vLLM reads by default.
    max_model_len: most tokens of prompt and output. None: as many as the engines accept.
    checkpoint_roots: directories of the checkpoints that updates may name. If empty, such updates
        are refused.
    weight_transfer_backend: backend of the process group of trainers of the vllm protocol, whose
        requests do not name it: "gloo", or None for NCCL, which is refused.

    max_body_bytes: largest body of a request. Trainers send whole batches in one request.
    max_text_characters: longest text to tokenize, in characters. A text prompt that cannot fit
        into the context is refused before.
    max_n: most samples of one prompt.
    max_samples: most samples of all prompts of one request.
    max_logprobs: most alternatives per token that a request may ask for.
    max_running_requests: most requests that generate at once; further ones wait.
    max_waiting_requests: most waiting requests; further ones get 429 with Retry-After.
    max_connections_backlog: most connections that the system queues until they are accepted.
    keepalive_timeout_s: seconds after which a connection without a whole request is closed.
    request_timeout_s: seconds after which the rest of a request is aborted.
    body_timeout_s: seconds within which a body must arrive.
    stalled_stream_timeout_s: seconds after which a stream whose client reads nothing is aborted.
    weight_transfer_timeout_s: seconds for joining a trainer's group, and for one call's broadcasts.
    drain_timeout_s: seconds that requests may continue when the server shuts down. Then they are
        aborted and answered with their tokens so far.
    """

    host: Name = "127.0.0.1"
    port: Annotated[int, Interval(0, 2**16 - 1)] = 8000
    api_key: Name | None = None
    admin_key: Name | None = None
    allowed_hosts: tuple[Name, ...] = ()
    protocols: tuple[Annotated[str, Choices(PROTOCOLS)], ...] = PROTOCOLS
    served_model_name: Name | None = None
    chat_template: Name | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: Annotated[str, Choices(TOOL_CALL_PARSERS)] = "auto"
    reasoning_parser: Annotated[str, Choices(REASONING_PARSERS)] = "auto"
    logprobs_mode: Annotated[str, Choices(LOGPROBS_MODES)] = "raw"
    generation_config: Annotated[str, Choices(GENERATION_CONFIGS)] = "vllm"
    max_model_len: PositiveInt | None = None
    checkpoint_roots: tuple[Name, ...] = ()
    weight_transfer_backend: Annotated[str, Choices(("gloo",))] | None = None

    max_body_bytes: PositiveInt = 2**30
    max_text_characters: PositiveInt = 2**24
    max_n: PositiveInt = 4096
    max_samples: PositiveInt = 2**16
    max_logprobs: PositiveInt = 256
    max_running_requests: PositiveInt = 4096
    max_waiting_requests: NonNegativeInt = 4096
    max_connections_backlog: PositiveInt = 4096
    keepalive_timeout_s: NonNegativeSeconds = 75.0
    request_timeout_s: NonNegativeSeconds = 86400.0
    body_timeout_s: NonNegativeSeconds = 60.0
    stalled_stream_timeout_s: NonNegativeSeconds = 60.0
    weight_transfer_timeout_s: NonNegativeSeconds = 600.0
    drain_timeout_s: NonNegativeSeconds = 30.0

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        self._check_keys()

    def _check_keys(self) -> None:
        if is_loopback(self.host):
            return
        if self.api_key is None:
            raise ConfigError(
                f"host={self.host!r} can be reached from other machines; set api_key, or serve on "
                "127.0.0.1"
            )
        if self.admin_key is None and set(CONTROL_PROTOCOLS) & set(self.protocols):
            raise ConfigError(
                f"host={self.host!r} can be reached from other machines, and "
                f"protocols={self.protocols} pause and update the engines; set admin_key, or "
                "protocols=('openai',)"
            )


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address, which only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
