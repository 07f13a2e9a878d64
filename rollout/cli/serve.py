"""rollout serve: serves a model over HTTP until SIGTERM or Ctrl-C.

`rollout.cli.main` calls `run`. An AsyncLLM serves the model with engines in child processes. `run`
sets up logging, and prints what is loaded and where the server listens.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Coroutine, Mapping, Sequence
from importlib import import_module
from typing import Any

from rollout import apis
from rollout.addresses import require_free_address
from rollout.cli.logs import add_verbose, log_to_stderr
from rollout.cli.models import (
    CONFIG_HELP,
    FLEET_HELP,
    LLM_HINTS,
    LLM_KINDS,
    engine_config,
    model_of,
    model_summary,
    settings_help,
    with_model,
)
from rollout.cli.settings import Kinds, Parser, UsageError, fields_of, help_of, read_settings
from rollout.config import GIB
from rollout.control.reports import EngineStats
from rollout.extras import extra_needed
from rollout.serve.config import ServeConfig
from rollout.serve.openai.chat_template import load_template
from rollout.text import tokenizer_of

_OF_SERVER = fields_of(ServeConfig)
# With `doors`, the former name of `protocols`.
SERVE_KINDS: Kinds = {**_OF_SERVER, "doors": _OF_SERVER["protocols"]}
_HINTS = LLM_HINTS | {"model_name": "served_model_name"}
_HINTS.pop("max_model_len")  # a setting here


def run(words: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C, then finish the running requests and return 0. Requests that
    still run after `drain_timeout_s` are aborted. `words` are the command's arguments. Raises
    UsageError for wrong arguments."""
    parser = Parser(
        "serve",
        "Serve a model over HTTP, until SIGTERM or Ctrl-C. Then running requests may end within\n"
        "drain_timeout_s, and the exit code is 0.",
    )
    add_verbose(parser)
    parser.epilog = settings_help(
        "the server (ServeConfig):\n" + help_of(ServeConfig), FLEET_HELP, CONFIG_HELP
    )
    given = parser.parse(words, SERVE_KINDS, LLM_KINDS, hints=_HINTS)
    settings = with_model(given.settings)
    of_server, of_llm = read_settings(settings, SERVE_KINDS, LLM_KINDS, hints=_HINTS)
    # Clients may ask for log-probs of prompts. Other requests cost no more.
    of_llm.setdefault("materialize_only_last_token_logits", False)
    # A client's next turn comes when the last one has ended, so cached blocks outlive their users.
    if of_llm.get("enable_prefix_caching"):
        of_llm.setdefault("prefix_caching_eviction_policy", "lru")
    if "doors" in of_server:
        if "protocols" in of_server:
            raise UsageError("doors is the former name of protocols: give protocols alone")
        if not given.json:  # with --json, stderr is JSON
            print("doors= is deprecated; write protocols=", file=sys.stderr)
        of_server["protocols"] = of_server.pop("doors")
    config = ServeConfig(**of_server)
    if config.max_model_len is not None:  # no request is longer, so the KV cache need not be
        of_llm.setdefault("max_sequence_length", config.max_model_len)
    # Checked before the engines start, which may take minutes.
    of_llm["model"] = model_of(of_llm)
    engine = engine_config(of_llm)
    of_llm["tokenizer"] = tokenizer_of(of_llm["model"], of_llm.get("tokenizer"))
    load_template(of_llm["tokenizer"], config.chat_template)
    require_free_address(config.host, config.port)
    with extra_needed("serve", "rollout serve"):
        import_module("aiohttp")
    log_to_stderr(is_verbose=given.verbose)
    if not given.json:
        num_engines = of_llm.get("data_parallel_size", 1)
        engines = "1 engine" if num_engines == 1 else f"{num_engines} engines"
        print(f"loading {model_summary(of_llm['model'], engine)} into {engines}", flush=True)
    _run_in_loop(_serve(of_llm, config, is_json=given.json))
    return 0


async def _serve(of_llm: Mapping[str, Any], config: ServeConfig, *, is_json: bool) -> None:
    async with apis.AsyncLLM(**of_llm) as llm:
        await llm.serve(config, blocking=False)
        # Imports torch, which takes seconds, so not before the words are checked.
        from rollout.serve.page.routes import example_request

        assert llm.serving.address is not None, "it listens"
        assert llm.serving.state is not None, "it listens"
        host, port = llm.serving.address
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if is_json:
            print(json.dumps({"url": url}), flush=True)
        else:
            example = example_request(llm.serving.state)
            print(opening(url, config, await llm.stats(), example), flush=True)
        await llm.serving.run()


def opening(
    url: str, config: ServeConfig, stats: EngineStats, example: Mapping[str, str] | None
) -> str:
    """Return the lines that tell what a server has loaded, and where to reach it. `stats` are the
    counters of the server's engines. `example` is a request to try, made by `example_request`, or
    None."""
    kv, weights = (
        sum(getattr(use, f"{part}_bytes") for use in stats.ranks) for part in ("kv", "weights")
    )
    num_tokens = stats.num_blocks_total * stats.block_size_tokens
    lines = [
        f"memory {weights / GIB:.2f} GiB of weights, {kv / GIB:.2f} GiB of KV cache "
        f"({num_tokens:,} tokens; {stats.max_sequence_length:,} at most in a sequence)",
        f"API    {url}/v1" if "openai" in config.protocols else f"API    {url}",
        f"watch  {url}/" + ("" if config.api_key is None else " (asks for the key)"),
    ]
    if example is not None:
        key = "" if config.api_key is None else ' -H "Authorization: Bearer $ROLLOUT_API_KEY"'
        lines.append(
            f"try    curl {url}/{example['path']}{key} -H 'Content-Type: application/json' "
            f"-d {shlex.quote(example['body'])}"
        )
    return "\n".join([*lines, "Ctrl-C to stop"])


def _run_in_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in a new event loop of uvloop if it is installed, else of asyncio."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)
