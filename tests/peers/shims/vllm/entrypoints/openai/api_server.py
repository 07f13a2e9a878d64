"""`vllm serve`'s command line, for `rollout serve` on the one model that all names stand for.

PEER_PYTHON runs the server, PEER_ROOT is the project, PEER_MODEL the model's directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

# Options that do not change what is asked of the server, with the number of their values (-1: up
# to the next option). The tiny model has the dtype of its directory and its own weights.
NEUTRAL = {
    "--dtype": 1,
    "--enable-auto-tool-choice": 0,
    "--enable-chunked-prefill": 0,
    "--enable-lora": 0,
    "--enable-per-request-metrics": 0,
    "--enable-prompt-tokens-details": 0,
    "--enable-scale-out": 0,
    "--enable-server-load-tracking": 0,
    "--enable-sleep-mode": 0,
    "--enable-tokenizer-info-endpoint": 0,
    "--enforce-eager": 0,
    "--gpu-memory-utilization": 1,
    "--load-format": 1,
    "--lora-modules": -1,
    "--max-cpu-loras": 1,
    "--max-lora-rank": 1,
    "--max-num-batched-tokens": 1,
    "--max-num-seqs": 1,
    "--seed": 1,
    "--show-hidden-metrics-for-version": 1,
    "--structured-outputs-config.backend": 1,
    "--tokenizer": 1,
    "--tool-call-parser": 1,
}
# Options with a counterpart among the settings of `rollout serve`.
SERVED = {
    "--host": "host",
    "--logprobs-mode": "logprobs_mode",
    "--max-logprobs": "max_logprobs",
    "--max-model-len": "max_sequence_length",
    "--model": "served_model_name",
    "--port": "port",
    "--served-model-name": "served_model_name",
}
SWITCHES = {
    "--enable-prefix-caching": ("enable_prefix_caching", "true"),
    "--no-enable-prefix-caching": ("enable_prefix_caching", "false"),
}
LOGPROBS_MODES = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
# Options without one: what they ask for is not served, or not by an option.
UNSERVED = {
    "--chat-template-content-format": "the content of a chat is given to the template as it came",
    "--enable-force-include-usage": "usage is sent where a request asks for it",
    "--enable-prompt-embeds": "embeddings are not served",
    "--enable-request-id-headers": "ids come in bodies",
    "--enable-return-routed-experts": "routed experts are not sent over HTTP",
    "--enable-weight-transfer": "the test's trainer needs a GPU",
    "--limit-mm-per-prompt": "images are not served",
    "--reasoning-parser": "the test reads a reasoning model's thoughts",
    "--return-sampling-mask": "the sampling mask is not sent over HTTP",
    "--return-tokens-as-token-ids": "a request asks for it, not the server's command line",
    "--root-path": "the server has no path of its own below a proxy's",
    "--runner": "pooling models are not served",
    "--skip-tokenizer-init": "a directory without a tokenizer says the same",
    "--tokens-only": "a request asks for it, not the server's command line",
    "--uds": "the server listens at an address, not at a socket's path",
    "--watermark-config": "watermarks are not served",
    "--worker-extension-cls": "workers take no classes of others",
}


class UnservedOptionError(Exception):
    """An option of `vllm serve` that `rollout serve` has not."""


def serve_command(arguments: Sequence[str]) -> list[str]:
    """The command of our server for `vllm serve`'s options, without the key, which is a variable.

    Raises UnservedOptionError for an option without a counterpart, KeyError for an unknown one.
    """
    fields = {"enable_prefix_caching": "true", "num_threads": "1", "max_logprobs": "20"}
    for name, values in _options(arguments):
        if name in UNSERVED:
            raise UnservedOptionError(f"{name}: {UNSERVED[name]}")
        if name in SERVED:
            (fields[SERVED[name]],) = values
        elif name in SWITCHES:
            field, value = SWITCHES[name]
            fields[field] = value
        elif name not in NEUTRAL and name != "--api-key":
            raise KeyError(f"{name} is not in the tables of {__file__}")
    if "logprobs_mode" in fields:
        fields["logprobs_mode"] = LOGPROBS_MODES[fields["logprobs_mode"]]
    settings = [f"{name}={value}" for name, value in fields.items()]
    command = [os.environ["PEER_PYTHON"], "-m", "rollout", "serve"]
    return [*command, f"model={os.environ['PEER_MODEL']}", *settings]


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The options with their values."""
    names = [at for at, argument in enumerate(arguments) if argument.startswith("--")]
    for at, end in zip(names, [*names[1:], len(arguments)], strict=True):
        name, _, value = arguments[at].partition("=")
        yield name, [value] if value else list(arguments[at + 1 : end])


def main(arguments: Sequence[str]) -> None:
    command = serve_command(arguments)
    environment = {**os.environ, "PYTHONPATH": os.environ["PEER_ROOT"]}
    for name, values in _options(arguments):
        if name == "--api-key":
            (environment["ROLLOUT_API_KEY"],) = values
    os.chdir(os.environ["PEER_ROOT"])
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    main(sys.argv[1:])
