"""rollout serve: a model over HTTP, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.apis.async_llm import AsyncLLM
from rollout.cli.event_loop import run_in_loop
from rollout.cli.models import MODEL_HELP, llm_kinds, model_of, with_model
from rollout.cli.settings import Kinds, Parser, UsageError, fields_of, help_of, read_settings
from rollout.config import CONFIG_HINTS
from rollout.serve.config import ServeConfig
from rollout.serve.openai.chat_template import load_template
from rollout.serve.server import require_free_address
from rollout.text import tokenizer_of

_OF_SERVER = fields_of(ServeConfig)
# With the former name of `protocols`, which ServeConfig still takes.
SERVE_KINDS: Kinds = {**_OF_SERVER, "doors": _OF_SERVER["protocols"]}
_HINTS = {**CONFIG_HINTS, "model_name": "served_model_name"}


def run(words: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns 0 once all requests are answered, or aborted after
    `drain_timeout_s`."""
    parser = Parser(
        "serve",
        "Serve a model over HTTP. After SIGTERM running requests end, then the exit code is 0.",
    )
    parser.epilog = f"{MODEL_HELP}of the server:\n{help_of(ServeConfig)}"
    given = parser.parse(words)
    words = with_model(given.settings)
    of_server, of_llm = read_settings(words, SERVE_KINDS, llm_kinds(), hints=_HINTS)
    # Clients of a server ask for log-probs of prompts; requests that do not cost nothing more.
    of_llm.setdefault("materialize_only_last_token_logits", False)
    if "doors" in of_server:
        if "protocols" in of_server:
            raise UsageError("doors is the former name of protocols: give protocols alone")
        if not given.json:  # whose stderr is JSON
            print("doors= is deprecated; write protocols=", file=sys.stderr)
        of_server["protocols"] = of_server.pop("doors")
    config = ServeConfig(**of_server)
    # Here, since engines may take minutes to start.
    of_llm["tokenizer"] = tokenizer_of(model_of(of_llm), of_llm.get("tokenizer"))
    load_template(of_llm["tokenizer"], config.chat_template)
    require_free_address(config)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    run_in_loop(_serve(of_llm, config, is_json=given.json))
    return 0


async def _serve(of_llm: Mapping[str, Any], config: ServeConfig, *, is_json: bool) -> None:
    async with AsyncLLM(**of_llm) as llm:
        serving = asyncio.ensure_future(llm.serve(config))
        while llm.serving.address is None and not serving.done():
            await asyncio.sleep(0.01)
        if llm.serving.address is not None:
            host, port = llm.serving.address
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            print(json.dumps({"url": url}) if is_json else f"serving at {url}", flush=True)
        await serving
