"""make_engine: an Engine whose steps run in a `vllm serve` process.

`rollout.apis.engines` calls it for `InferenceConfig(engine="vllm-server")`, by an entry point.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollout.config import InferenceConfig
from rollout.engine.counters import EngineCounters
from rollout.engine.engine import Engine
from rollout.engine.guard import CallGuard
from rollout.engine.output_processor import OutputProcessor
from rollout.errors import ConfigError, InvalidRequestError, LockstepError, ModelError
from rollout.models.checkpoints.directory import fault_of_directory
from rollout.models.checkpoints.reader import read_config
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.sampling_params import SamplingParams
from rollout.scheduling.admission import AdmissionLimits
from rollout.step.seeds import given_or_drawn
from rollout.text import Tokenizer
from rollout_vllm.inputs import CheckedInputProcessor, end_ids, shared_settings
from rollout_vllm.options import LOGPROBS_MODES, check_params
from rollout_vllm.server.client import ServerRefusalError, VllmServer
from rollout_vllm.server.executor import ServerExecutor
from rollout_vllm.server.pipeline import ServerPipeline
from rollout_vllm.server.scheduler import ServerScheduler
from rollout_vllm.server.suspension import ServerSuspension, check_server_mode

SHARED_MEMORY = "/dev/shm"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
START = "VLLM_SERVER_DEV_MODE=1 vllm serve DIR --enable-scale-out"
# Fields of InferenceConfig that this engine follows. All others are refused off their defaults.
FOLLOWED = frozenset(
    {
        *("engine", "engine_options", "max_requests", "max_sequence_length", "seed"),
        *("kv_cache_management_mode", "max_kv_staleness_versions", "enable_prefix_caching"),
        *("prefix_caching_coordinator_policy", "reject_non_finite_weights"),
        *("track_generated_token_events", "metrics_writer", "logging_step_interval"),
    }
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # in a config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """`engine_options` of engine="vllm-server".

    url: the server's address. api_key: its --api-key. timeout_s: seconds without an answer after
    which the server counts as dead. update_timeout_s: seconds in which it must load an update.
    updates_directory: a folder that the server can read, for updates. None: shared memory, if the
    server runs on this machine.
    """

    url: str
    api_key: str | None = None
    timeout_s: float = 60.0
    update_timeout_s: float = 600.0
    updates_directory: str | None = None


class ServerEngine(Engine):
    """An Engine over a vLLM server. `server_settings`: what all engines of a fleet must share.
    `facts`: what `rollout explain` shows."""

    server_settings: dict[str, str]
    facts: dict[str, dict[str, str]]

    @property
    def shared_settings(self) -> dict[str, str]:
        """The settings that all engines of a fleet must share, as texts by name."""
        return self.server_settings

    def describe(self) -> dict[str, dict[str, str]]:
        """Return texts by title and name, for `rollout explain`."""
        return self.facts


def make_engine(
    model: str | Path | Any,
    config: InferenceConfig,
    tokenizer: Tokenizer | None = None,
    weights_version: int = 0,
) -> ServerEngine:
    """Return an engine in RUNNING. `model` is the directory that the server serves.

    Raises ConfigError for a field or an option that cannot be followed, and for a server without
    the routes that are needed, or that does not answer; ModelError for another model.
    """
    options = _options(config)
    if not isinstance(model, str | Path):
        raise ModelError(
            "engine='vllm-server' takes the directory of a model, which the server serves, not a "
            f"{type(model).__name__}"
        )
    if fault := fault_of_directory(model):
        raise ModelError(fault)
    directory = Path(model).resolve()
    config = config.replace(seed=given_or_drawn(config.seed, "an engine"))
    server = VllmServer(options.url, api_key=options.api_key, timeout_s=options.timeout_s)
    try:
        return _engine_over(server, options, directory, config, tokenizer, weights_version)
    except BaseException:
        server.close()
        raise


def _options(config: InferenceConfig) -> ServerOptions:
    """Return the checked engine options. Raises ConfigError for them and for other fields."""
    for name, default in ((f.name, f.default) for f in fields(config)):
        value = getattr(config, name)
        if name not in FOLLOWED and value != default:
            shown = getattr(value, "value", value)
            raise ConfigError(
                f"{name}={shown!r} does not work with engine='vllm-server': give it to vllm serve, "
                "or leave it out"
            )
    check_server_mode(config.kv_cache_management_mode, "kv_cache_management_mode")
    known = [f.name for f in fields(ServerOptions)]
    unknown = sorted(set(config.engine_options) - set(known))
    if unknown:
        raise ConfigError(f"engine_options[{unknown[0]!r}] is unknown; use some of {known}")
    if "url" not in config.engine_options:
        raise ConfigError(
            "engine='vllm-server' needs engine_options={'url': 'http://HOST:PORT'}, the address of "
            f"a server that was started as: {START}"
        )
    options = ServerOptions(**config.engine_options)
    address = urlsplit(str(options.url))
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(f"url={options.url!r} must be like http://HOST:PORT")
    for name in ("timeout_s", "update_timeout_s"):
        seconds = getattr(options, name)
        if not isinstance(seconds, int | float) or not seconds > 0:
            raise ConfigError(f"engine_options[{name!r}]={seconds!r} must be a number above 0")
    return options


def _updates_directory(options: ServerOptions) -> Path:
    """Return the folder for updates. Raises ConfigError if it is needed or does not exist."""
    given = options.updates_directory
    if given is None and urlsplit(options.url).hostname not in LOCAL_HOSTS:
        raise ConfigError(
            f"the vLLM server at {options.url} runs on another machine: give "
            "engine_options={'updates_directory': DIR}, a folder that both machines have mounted"
        )
    directory = Path(given or SHARED_MEMORY)
    if not directory.is_dir():
        raise ConfigError(f"updates_directory={str(directory)!r} is not a folder")
    return directory


def _server_config(server: VllmServer) -> dict[str, Any]:
    """Return the server's VllmConfig. Raises ConfigError if a route is missing that is needed."""
    try:
        found = server.call("GET", "/server_info?config_format=json")
    except LockstepError as error:
        raise ConfigError(f"{error}: {START}") from error
    except ServerRefusalError as error:
        raise ConfigError(
            f"the vLLM server at {server.url} lacks the routes that update its weights, or refuses "
            f"them ({error}); start it as: {START}"
        ) from error
    try:
        body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "detokenize": False}}
        server.call("POST", "/inference/v1/generate", body)
    except ServerRefusalError as error:
        raise ConfigError(
            f"the vLLM server at {server.url} generates no tokens ({error}); start it as: {START}"
        ) from error
    config: dict[str, Any] = found["vllm_config"]
    num_servers = config["parallel_config"]["data_parallel_size"]
    if num_servers > 1:
        raise ConfigError(
            f"the vLLM server has data_parallel_size={num_servers}; start that many servers, each "
            "with an engine beside it"
        )
    if config["speculative_config"] and config["device_config"]["device"] == "cpu":
        raise ConfigError(
            "the vLLM server has speculative decoding on a CPU, where vLLM verifies drafts with "
            "wrong temperatures; start it without"
        )
    mode = config["model_config"]["logprobs_mode"]
    if mode not in LOGPROBS_MODES:
        raise ConfigError(
            f"the vLLM server reports {mode}, and records hold log-probs; start it with "
            f"--logprobs-mode {LOGPROBS_MODES[0]} or {LOGPROBS_MODES[1]}"
        )
    return config


def _check_reload(directory: Path, names: Sequence[str], device: str) -> None:
    """Raise ConfigError for a model that vLLM's reload leaves with old weights. `names`: the
    checkpoint's tensors."""
    config = read_config(directory)
    has_experts = any(config.get(name) for name in _EXPERTS)
    is_tied = config.get("tie_word_embeddings") or not any("lm_head" in name for name in names)
    if has_experts:
        kind = "a mixture of experts"
    elif is_tied and device == "cpu":
        kind = "a model with tied embeddings on a CPU"
    else:
        return
    raise ConfigError(
        f"{directory} is {kind}: vLLM's own reload was seen to leave old weights in it; use "
        "engine='vllm', which mends that"
    )


def _engine_over(
    server: VllmServer,
    options: ServerOptions,
    directory: Path,
    config: InferenceConfig,
    tokenizer: Tokenizer | None,
    weights_version: int,
) -> ServerEngine:
    """Return an engine whose parts use `server`."""
    updates_directory = _updates_directory(options)
    theirs = _server_config(server)
    name = uuid.uuid4().hex[:12]
    executor = ServerExecutor(
        server,
        directory,
        weights_version,
        name=name,
        updates_directory=updates_directory,
        update_timeout_s=options.update_timeout_s,
        reject_non_finite=config.reject_non_finite_weights,
    )
    _check_reload(directory, executor.names, theirs["device_config"]["device"])
    executor.start(directory)
    model, scheduling = theirs["model_config"], theirs["scheduler_config"]
    max_running = min(config.max_requests or scheduling["max_num_seqs"], scheduling["max_num_seqs"])
    scheduler = ServerScheduler(
        server,
        name=name,
        version=lambda: executor.version,
        max_running=max_running,
        max_tokens=scheduling["max_num_batched_tokens"],
        block_size=theirs["cache_config"]["block_size"],
        shares_prefixes=config.enable_prefix_caching,
    )
    counters = EngineCounters(writer=config.metrics_writer, interval=config.logging_step_interval)
    outputs = BoundedOutputs(
        track_paused=False,
        track_generated_tokens=config.track_generated_token_events,
        totals=counters.requests,
    )
    executor.is_settled = lambda: not (scheduler.running or outputs.ended_ids())
    guard = CallGuard()
    inputs = _input_processor(theirs, scheduler, directory, config, tokenizer)
    engine = ServerEngine(
        inputs=inputs,
        scheduler=scheduler,
        outputs=outputs,
        pipeline=ServerPipeline(
            server, scheduler, outputs, counters, guard, timeout_s=options.timeout_s
        ),
        executor=executor,
        suspension=ServerSuspension(scheduler, outputs, config.kv_cache_management_mode),
        counters=counters,
        guard=guard,
        max_kv_staleness_versions=config.max_kv_staleness_versions,
    )
    engine.server_settings = shared_settings(
        inputs,
        config,
        directory,
        dtype=model["dtype"],
        quantization=model["quantization"],
        logprobs_mode=model["logprobs_mode"],
    )
    engine.facts = _facts(server, theirs, max_running, config, updates_directory)
    return engine


class BoundedOutputs(OutputProcessor):
    """An OutputProcessor whose records say that the versions of KV are bounds."""

    def add_request(self, record: DynamicInferenceRequestRecord) -> None:
        for segment in record.requests:
            segment.kv_versions_are_bounds = True
        super().add_request(record)


def check_server_params(params: SamplingParams, logprobs_mode: str) -> None:
    """Raise InvalidRequestError for parameters that a vLLM server does not follow for a client."""
    try:
        check_params(params, logprobs_mode)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"logprobs_mode={params.logprobs_mode!r} cannot be reported: the vLLM server has "
            f"--logprobs-mode {logprobs_mode} for all requests; start it with the other one, or "
            "sample without temperature, truncation, penalties and biases"
        ) from error
    for name in ("presence_penalty", "frequency_penalty"):
        if value := getattr(params, name):
            raise InvalidRequestError(
                f"{name}={value} does not work with engine='vllm-server': a request continues "
                "after an update with its output as a prompt, which vLLM does not penalise; leave "
                "it out"
            )


def _input_processor(
    theirs: dict[str, Any],
    scheduler: ServerScheduler,
    directory: Path,
    config: InferenceConfig,
    tokenizer: Tokenizer | None,
) -> CheckedInputProcessor:
    model, num_blocks = theirs["model_config"], theirs["cache_config"]["num_gpu_blocks"]
    max_length = model["max_model_len"]
    if (wanted := config.max_sequence_length) is not None:
        if wanted > max_length:
            raise ConfigError(
                f"max_sequence_length={wanted} is above --max-model-len {max_length} of the vLLM "
                "server"
            )
        max_length = wanted
    limits = AdmissionLimits(
        vocab_size=_vocab_size(directory),
        max_sequence_length=max_length,
        max_pool_tokens=max_length if num_blocks is None else num_blocks * scheduler.block_size,
        max_tokens_per_step=scheduler.max_tokens,
        enable_chunked_prefill=theirs["scheduler_config"]["enable_chunked_prefill"],
        can_score_prompts=False,  # the streams have no scores of prompts
    )
    assert config.seed is not None, "make_engine has drawn one"
    inputs = CheckedInputProcessor(
        limits=limits,
        tokenizer=tokenizer,
        end_ids=end_ids(directory, tokenizer),
        block_size=scheduler.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        seed=config.seed,
    )
    inputs.check_params = partial(check_server_params, logprobs_mode=model["logprobs_mode"])
    return inputs


def _vocab_size(directory: Path) -> int:
    config = read_config(directory)
    found = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(found, int):
        raise ModelError(f"{directory}/config.json names no vocab_size")
    return found


def _facts(
    server: VllmServer,
    theirs: dict[str, Any],
    max_running: int,
    config: InferenceConfig,
    updates_directory: Path,
) -> dict[str, dict[str, str]]:
    bound = config.max_kv_staleness_versions
    kv = "without a limit" if bound is None else f"at most {bound} versions old"
    if bound == 0:
        kv = "never older than its token's policy"
    model = theirs["model_config"]
    return {
        "vLLM server": {
            "url": server.url,
            "version": str(server.call("GET", "/version")["version"]),
            "model": str(model["model"]),
            "dtype": str(model["dtype"]),
            "device": str(theirs["device_config"]["device"]),
            "max_model_len": str(model["max_model_len"]),
            "requests at once": str(max_running),
            "logprobs_mode": str(model["logprobs_mode"]),
            "updates": f"reloaded from files in {updates_directory}",
        },
        "promises": {
            "policy versions": "exact: the server names the weights of each stream",
            "KV versions": f"bounds, not exact: KV is {kv}",
            "updates": "verified before the server is touched; a load that fails pauses the server",
            "other clients": "of this server wait during an update, and may see mixed weights",
        },
        "refused": {
            "KV mode": "offload",
            "release": "weights",
            "requests": "prompt log-probs, presence_penalty, frequency_penalty, images",
            "models": "mixtures of experts; with tied embeddings on a CPU",
            "updates": "LoRA adapters",
            "settings": "prefix_reuse_across_versions, record_routing",
        },
    }
