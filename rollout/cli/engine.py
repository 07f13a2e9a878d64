"""rollout engine: runs one engine, which connects to the coordinator at --join ADDRESS.

`rollout.cli.main` calls `run`. The engine runs in this process, its other tensor-parallel ranks in
child processes. `run` sets this process's SIGTERM handler and logging.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

from rollout.apis.arguments import config_with
from rollout.apis.engine_process import REGISTER_S, run_engine
from rollout.cli.models import CONFIG_KINDS, MODEL_KINDS, model_of, with_model
from rollout.cli.settings import Kinds, Parser, UsageError, read_settings
from rollout.config import CONFIG_HINTS
from rollout.coordinator.net.key_folder import ENGINE, peer_keys

_KINDS: Kinds = {"weights_version": int, "register_timeout_s": float}


def run(words: Sequence[str]) -> int:
    """Serve until the coordinator sends SHUTDOWN, then return 0. words: the command's arguments.
    SIGTERM raises SystemExit: the engine disconnects, and other engines continue its requests.
    Raises UsageError for wrong arguments."""
    parser = Parser(
        "engine",
        "Run one engine of a fleet, until its coordinator shuts the engines down.",
    )
    parser.epilog = (
        "settings:\n"
        "  model=DIR, or DIR        a Hugging Face directory (config.json, *.safetensors)\n"
        "  tokenizer=DIR            directory of tokenizer.json, if not the model's\n"
        "  weights_version=0        version of the weights in that directory\n"
        f"  register_timeout_s={REGISTER_S:g}   seconds to wait for the coordinator\n"
        "  and every field of InferenceConfig, such as block_size_tokens=16\n"
    )
    parser.add_argument(
        "--join",
        metavar="ADDRESS",
        help="the coordinator's address: tcp://HOST:PORT, ipc:// or a port",
    )
    parser.add_argument(
        "--keys",
        metavar="DIR",
        help="folder of this peer's keys, or the whole folder of `rollout keys`",
    )
    parser.add_argument(
        "--as",
        dest="peer",
        default=ENGINE,
        metavar="NAME",
        help=f"name of the peer whose keys are used ({ENGINE})",
    )
    given = parser.parse(words)
    of_model, fields, own = read_settings(
        with_model(given.settings), MODEL_KINDS, CONFIG_KINDS, _KINDS, hints=CONFIG_HINTS
    )
    if given.join is None:
        raise UsageError("give the coordinator's address: --join tcp://HOST:PORT")
    model_of(of_model)
    curve = None if given.keys is None else peer_keys(given.keys, given.peer)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    # SystemExit unwinds the stack, so the engine disconnects and others continue its requests.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    config = config_with(None, fields)
    run_engine(given.join, **of_model, inference_config=config, curve=curve, **own)
    return 0
