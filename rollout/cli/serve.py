"""rollout serve: serves a model over HTTP until SIGTERM or Ctrl-C.

`rollout.cli.main` calls `run`. An AsyncLLM serves the model; its engines are child processes. `run`
prints the URL and sets up logging.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from rollout.apis.async_llm import AsyncLLM
from rollout.cli.models import MODEL_HELP, llm_kinds, model_of, with_model
from rollout.cli.settings import Kinds, Parser, UsageError, fields_of, help_of, read_settings
from rollout.config import CONFIG_HINTS
from rollout.serve.config import ServeConfig
from rollout.serve.openai.chat_template import load_template
from rollout.serve.server import require_free_address
from rollout.text import tokenizer_of

_OF_SERVER = fields_of(ServeConfig)
# With `doors`, the former name of `protocols`.
SERVE_KINDS: Kinds = {**_OF_SERVER, "doors": _OF_SERVER["protocols"]}
_HINTS = {**CONFIG_HINTS, "model_name": "served_model_name"}


def run(words: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C, then finish the running requests and return 0. Requests that
    still run after `drain_timeout_s` are aborted. words: the command's arguments. Raises UsageError
    for wrong arguments."""
    parser = Parser(
        "serve",
        "Serve a model over HTTP, until SIGTERM or Ctrl-C. Then running requests may end within\n"
        "drain_timeout_s, and the exit code is 0.",
    )
    parser.epilog = f"{MODEL_HELP}of the server:\n{help_of(ServeConfig)}"
    given = parser.parse(words)
    words = with_model(given.settings)
    of_server, of_llm = read_settings(words, SERVE_KINDS, llm_kinds(), hints=_HINTS)
    # Clients may ask for log-probs of prompts. Other requests cost no more.
    of_llm.setdefault("materialize_only_last_token_logits", False)
    if "doors" in of_server:
        if "protocols" in of_server:
            raise UsageError("doors is the former name of protocols: give protocols alone")
        if not given.json:  # with --json, stderr is JSON
            print("doors= is deprecated; write protocols=", file=sys.stderr)
        of_server["protocols"] = of_server.pop("doors")
    config = ServeConfig(**of_server)
    # Checked before the engines start, which may take minutes.
    of_llm["tokenizer"] = tokenizer_of(model_of(of_llm), of_llm.get("tokenizer"))
    load_template(of_llm["tokenizer"], config.chat_template)
    require_free_address(config)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    _run_in_loop(_serve(of_llm, config, is_json=given.json))
    return 0


async def _serve(of_llm: Mapping[str, Any], config: ServeConfig, *, is_json: bool) -> None:
    async with AsyncLLM(**of_llm) as llm:
        await llm.serve(config, blocking=False)
        assert llm.serving.address is not None, "it listens"
        host, port = llm.serving.address
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        print(json.dumps({"url": url}) if is_json else f"serving at {url}", flush=True)
        await llm.serving.run()


def _run_in_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end in a new event loop: uvloop's if installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)
