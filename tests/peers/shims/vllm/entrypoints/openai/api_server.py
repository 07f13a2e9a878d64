"""`vllm serve`'s command line, for `rollout serve` on the one model that all names stand for.

PEER_PYTHON runs the server, PEER_ROOT is the project, PEER_MODEL the model's directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

# Options that do not change what is asked of the server: the tiny model has the dtype of its
# directory and its own weights.
NEUTRAL = {
    "--dtype",
    "--enable-auto-tool-choice",
    "--enable-chunked-prefill",
    "--enable-lora",
    "--enable-per-request-metrics",
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
    "--enable-scale-out",
    "--enable-server-load-tracking",
    "--enable-sleep-mode",
    "--enable-tokenizer-info-endpoint",
    "--enforce-eager",
    "--gpu-memory-utilization",
    "--load-format",
    "--lora-modules",
    "--max-cpu-loras",
    "--max-lora-rank",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--runner",
    "--seed",
    "--show-hidden-metrics-for-version",
    "--structured-outputs-config.backend",
    "--tokenizer",
    "--tool-call-parser",
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
# vLLM keeps prefixes after their last user, unless it is told otherwise.
PREFIX_CACHING = {"enable_prefix_caching": "true", "prefix_caching_eviction_policy": "lru"}
LOGPROBS_MODES = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
# Options without one: what they ask for is not served, or not by an option.
UNSERVED = {
    "--api-server-count": "one process serves",
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
    fields = {**PREFIX_CACHING, "num_threads": "1", "max_logprobs": "20"}
    for name, values in _options(arguments):
        if name in UNSERVED:
            raise UnservedOptionError(f"{name}: {UNSERVED[name]}")
        if name in SERVED:
            (fields[SERVED[name]],) = values
        elif name == "--no-enable-prefix-caching":
            for field in PREFIX_CACHING:
                del fields[field]
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
