"""ServeConfig: where a server listens, who may call it, and its bounds."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated

from rollout.errors import ConfigError
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

DOORS = ("openai", "vllm", "sglang")
CONTROL_DOORS = ("vllm", "sglang")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Config of one server. Raises ConfigError, naming field, value and remedy.

    host: the address that is listened at. Off loopback, keys are required.
    port: 0 takes a free one.
    api_key: clients send it as `Authorization: Bearer KEY` to generate. None: everybody may. Not on
        a command line, which others can read: set ROLLOUT_API_KEY.
    admin_key: the same for the verbs that pause, update and abort. It also opens all others. As a
        variable: ROLLOUT_ADMIN_KEY.
    allowed_hosts: names beside `host` under which the server is called, as by a proxy. Requests
        with another Host, and those of pages of other sites (Origin), are refused. None at all
        takes every Host off loopback, where keys are required.
    doors: protocols that are served: openai (completions, chat, tokens in and out), vllm and sglang
        (their control verbs, and SGLang's generate).
    served_model_name: what clients call the model. None: the name of its directory.
    chat_template: a file with the Jinja template of chats, or its text. None: the model's own.
    trust_request_chat_template: whether requests may bring a template of their own. It runs in a
        sandbox, but for as long as it likes.
    tool_call_parser: the format in which the model writes tool calls. "auto": the one that its chat
        template shows. "none": calls are not looked for.
    reasoning_parser: the tags around what the model thinks, which chats give as `reasoning`.
        "auto": those that the chat template shows. "none": thoughts stay in the content.
    logprobs_mode: of log-probs in the openai door; see SamplingParams.
    generation_config: what fields of the draw are in the openai door if a client leaves them out.
        "vllm": neutral (temperature 1, no truncation, no penalty), so that a client that sends no
        top_k draws from the whole distribution, as its trainer takes it. "auto": those of the
        model's generation_config.json, which is vLLM's default.
    max_model_len: most tokens of prompt and output. None, or more: as many as the engines take.
    checkpoint_roots: directories below which checkpoints may lie that an update names. None at all
        refuses such updates.
    weight_transfer_backend: of the group that trainers of the vllm door make, which do not name it:
        "gloo", or None for NCCL, which is refused.

    max_body_bytes: largest body of a request. Trainers send whole batches in one.
    max_text_characters: longest text that is tokenized, in characters. A prompt is refused
        earlier, if the context cannot hold it whatever its tokens are.
    max_n: most samples of one prompt.
    max_samples: most samples of all prompts of one request.
    max_logprobs: most alternatives that a request may ask for with each token.
    max_running_requests: most requests that generate at once; further ones wait.
    max_waiting_requests: most requests that wait so; further ones get 429 with Retry-After.
    max_connections_backlog: connections that the system holds until they are accepted.
    keepalive_timeout_s: a connection without a whole request for so long is closed.
    request_timeout_s: after so long the rest of a request is aborted.
    body_timeout_s: a body that takes longer to arrive is refused.
    stalled_stream_timeout_s: a stream whose client takes nothing for so long is aborted.
    weight_transfer_timeout_s: how long a trainer's group, and the broadcasts of one call, may take.
    drain_timeout_s: how long a server that ends lets requests go on; then they are aborted, and
        get the tokens that they have.
    """

    host: Name = "127.0.0.1"
    port: Annotated[int, Interval(0, 2**16 - 1)] = 8000
    api_key: Name | None = None
    admin_key: Name | None = None
    allowed_hosts: tuple[Name, ...] = ()
    doors: tuple[Annotated[str, Choices(DOORS)], ...] = DOORS
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
        if self.admin_key is None and set(CONTROL_DOORS) & set(self.doors):
            raise ConfigError(
                f"host={self.host!r} can be reached from other machines, and doors={self.doors} "
                "pause and update the engines; set admin_key, or doors=('openai',)"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
