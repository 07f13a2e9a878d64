"""ServeConfig: where a server listens, who may call it, and its bounds."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
from dataclasses import dataclass

from rollout.errors import ConfigError
from rollout.sampling_params import LOGPROBS_MODES

DOORS = ("openai", "vllm", "sglang")
CONTROL_DOORS = ("vllm", "sglang")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Config of one server. Raises ConfigError, naming field, value and remedy.

    host: the address that is listened at. Off loopback, keys are required.
    port: 0 takes a free one.
    api_key: clients send it as `Authorization: Bearer KEY` to generate. None: everybody may.
    admin_key: the same for the verbs that pause, update and abort. It also opens all others.
    allowed_hosts: names beside `host` under which the server is called, as by a proxy. Requests
        with another Host, and those of pages of other sites (Origin), are refused. None at all
        takes every Host off loopback, where keys are required.
    doors: protocols that are served: openai (completions, chat, tokens in and out), vllm and sglang
        (their control verbs, and SGLang's generate).
    served_model_name: what clients call the model. None: the name of its directory.
    chat_template: a file with the Jinja template of chats, or its text. None: the model's own.
    trust_request_chat_template: whether requests may bring a template of their own. It runs in a
        sandbox, but for as long as it likes.
    logprobs_mode: of log-probs in the openai door; see SamplingParams.
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

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    admin_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    doors: tuple[str, ...] = DOORS
    served_model_name: str | None = None
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    logprobs_mode: str = "raw"
    max_model_len: int | None = None
    checkpoint_roots: tuple[str, ...] = ()
    weight_transfer_backend: str | None = None

    max_body_bytes: int = 2**30
    max_text_characters: int = 2**24
    max_n: int = 4096
    max_samples: int = 2**16
    max_logprobs: int = 256
    max_running_requests: int = 4096
    max_waiting_requests: int = 4096
    max_connections_backlog: int = 4096
    keepalive_timeout_s: float = 75.0
    request_timeout_s: float = 86400.0
    body_timeout_s: float = 60.0
    stalled_stream_timeout_s: float = 60.0
    weight_transfer_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check(field.name, str(field.type))
        for door in self.doors:
            if door not in DOORS:
                raise ConfigError(f"doors={self.doors!r} has {door!r}; the doors are {list(DOORS)}")
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise ConfigError(
                f"logprobs_mode={self.logprobs_mode!r} must be one of {list(LOGPROBS_MODES)}"
            )
        if self.weight_transfer_backend not in (None, "gloo"):
            raise ConfigError(
                f"weight_transfer_backend={self.weight_transfer_backend!r} is not built; it can be "
                "'gloo'"
            )
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port={self.port} must be in [0, {2**16 - 1}]")
        self._check_keys()

    def _check(self, name: str, kind: str) -> None:
        """Refuse a value that is not of its field's type, or a bound that lets nothing through."""
        value = getattr(self, name)
        if value is None and kind.endswith("| None"):
            return
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind.startswith("int"):
            low = 0 if name in ("port", "max_waiting_requests") else 1
            if not (isinstance(value, int) and is_number and value >= low):
                raise ConfigError(f"{name}={value!r} must be an integer of at least {low}")
        elif kind == "bool":
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r} must be True or False")
        elif kind == "float":
            if not (is_number and math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}={value!r} must be a number of seconds, 0 or more")
        elif kind.startswith("str"):
            if not (isinstance(value, str) and value):
                raise ConfigError(f"{name}={value!r} must be a text")
        else:
            is_texts = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
            if not is_texts:
                raise ConfigError(f"{name}={value!r} must be a tuple of texts")
            object.__setattr__(self, name, tuple(value))

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
