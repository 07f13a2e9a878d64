"""ServeConfig: a server's address, keys, protocols and limits.

Users pass a ServeConfig to LLM.serve and AsyncLLM.serve (`rollout.apis`). `rollout.cli.serve` fills
one from settings. `rollout.serve` (access, app, server, state) reads it. The script http_fields
reads PROTOCOLS.
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

    host: address to listen at. Keys are required unless it is a loopback address.
    port: port to listen at. 0 takes a free port.
    api_key: key that clients send as `Authorization: Bearer KEY` to generate. None requires no key.
        For `rollout serve`, set the environment variable ROLLOUT_API_KEY, because other users can
        read command lines.
    admin_key: key for the routes that pause, update and abort. It also opens all other routes. For
        `rollout serve`, set the variable ROLLOUT_ADMIN_KEY.
    allowed_hosts: further host names of the server, such as a proxy's. A request is refused if its
        header Host or Origin names another site. If the server listens off loopback and the tuple
        is empty, every Host is accepted.
    protocols: protocols to serve. "openai" has completions, chat, and tokens in and out. "vllm" has
        vLLM's control routes. "sglang" has SGLang's control routes and /generate.
    served_model_name: name of the model for clients. None takes the name of the model's directory.
    chat_template: file with the Jinja template of chats, or the template's text. None takes the
        model's template.
    trust_request_chat_template: whether a request can bring its own template. Such a template runs
        in a sandbox without a time limit.
    tool_call_parser: format in which the model writes tool calls. "auto" takes the format in the
        chat template. With "none", tool calls are not parsed.
    reasoning_parser: tags around the model's thoughts, which chats return as `reasoning`. "auto"
        takes the tags in the chat template. With "none", thoughts stay in the content.
    logprobs_mode: kind of log-probs in the openai protocol; see SamplingParams.
    generation_config: source of default sampling fields in the openai protocol. "vllm" has neutral
        values (temperature 1, no truncation, no penalty), as trainers assume. "auto" reads the
        model's generation_config.json, as vLLM does by default.
    max_model_len: most tokens of prompt and output. None takes as many as the engines accept.
    checkpoint_roots: directories with the checkpoints that updates can load. Updates from
        checkpoints are refused if the tuple is empty.
    weight_transfer_backend: torch.distributed backend of the trainers' process group, for requests
        of the vllm protocol that name no backend. None refuses such requests.

    max_body_bytes: largest body of a request. Trainers send whole batches in one request.
    max_text_characters: longest text to tokenize, in characters.
    max_n: most samples of one prompt.
    max_samples: most samples of all prompts of one request.
    max_logprobs: most alternatives per token that a request can ask for.
    max_running_requests: most requests that generate at once. Further requests wait.
    max_waiting_requests: most waiting requests. Further requests get 429 with Retry-After.
    max_connections_backlog: most connections that the system queues until the server accepts them.
    keepalive_timeout_s: seconds without a complete request after which a connection is closed.
    request_timeout_s: seconds after which the unfinished samples of a request are aborted.
    body_timeout_s: seconds within which a body must arrive.
    stalled_stream_timeout_s: seconds after which a stream whose client reads nothing is aborted.
    weight_transfer_timeout_s: seconds for joining a trainer's process group, and for the broadcasts
        of one call.
    drain_timeout_s: seconds that requests can continue when the server shuts down. After this time
        they are aborted and answered with their tokens so far.
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
