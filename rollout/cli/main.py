"""`rollout`: runs a subcommand, and reports an error as one line and an exit code.

`main` is the entry point of the installed script `rollout`, and `rollout.__main__` calls it. Each
subcommand is a module of `rollout.cli`, or an entry point of another installed package.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from rollout import __version__
from rollout.cli.settings import UsageError
from rollout.errors import ConfigError, InvalidRequestError, RolloutError
from rollout.extras import extra_needed
from rollout.keyword_hints import remedy_of_unknown

USAGE, FAULT, INTERRUPTED = 2, 1, 130  # exit codes
# Each command is `run(arguments) -> exit code` of the module rollout.cli.NAME. Only the chosen
# module is imported, because some import torch, which takes seconds.
COMMANDS = {
    "serve": "serve a model over HTTP",
    "generate": "complete prompts of a file or of stdin, as JSON lines",
    "bench": "measure throughput and latency of an engine or a server",
    "explain": "show what a config resolves to on this machine, and why",
    "top": "watch a fleet in the terminal",
    "coordinator": "distribute requests of clients to engines that join by address",
    "engine": "run one engine of a fleet",
    "keys": "make the keys of a fleet over several hosts",
}
# Installed packages add commands as entry points of this group: `run(arguments) -> exit code` each.
ENTRY_POINTS = "rollout.commands"
ABOUT_PACKAGES = {  # their help texts
    "train": "train a model by reinforcement learning",
    "report": "draw the curves of training runs, as a page or a figure",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments`, or sys.argv if None, and return its exit code.

    An error is printed to stderr as one line, or as a JSON object with `--json`. The exit code is 2
    for a wrong command line, config or request, and 1 for another RolloutError or OSError. An
    interrupt returns 130 and a closed stdout returns 1, without a message. Other exceptions are
    raised."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except (UsageError, ConfigError, InvalidRequestError) as error:
        return _report(error, USAGE, words)
    except BrokenPipeError:  # the reader of stdout has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAULT
    except (RolloutError, OSError) as error:
        return _report(error, FAULT, words)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if words else USAGE
    name, *rest = words
    if name in ("-V", "--version"):
        print(f"rollout {__version__}")
        return 0
    if name in COMMANDS:
        with extra_needed("serve", f"rollout {name}"):
            run = import_module(f"rollout.cli.{name}").run
    elif name in (others := _commands_of_packages()):
        with extra_needed(name, f"rollout {name}"):  # the extra has the command's name
            run = others[name].load()
    else:
        known = [*COMMANDS, *others]
        remedy = remedy_of_unknown(name, known, f"one of: {', '.join(known)}", cutoff=0.6)
        if os.path.isdir(name):
            remedy = f"for a model give `rollout serve {name}`"
        raise UsageError(f"unknown command {name!r}; {remedy}")
    exit_code: int = run(rest)
    return exit_code


def _commands_of_packages() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def _help() -> str:
    lines = [f"  {name:<13}{about}" for name, about in COMMANDS.items()]
    lines += [
        f"  {name:<13}{ABOUT_PACKAGES.get(name, f'a command of {entry.module}')}"
        for name, entry in sorted(_commands_of_packages().items())
    ]
    return "\n".join(
        [
            "usage: rollout COMMAND [options] key=value ...",
            "",
            *lines,
            "",
            "`rollout COMMAND --help` lists the settings of a command, written key=value: every",
            "field of InferenceConfig, and the command's own.",
        ]
    )


def _report(error: Exception, exit_code: int, words: Sequence[str]) -> int:
    message = " ".join(str(error).split()) or type(error).__name__
    if "--json" in words:
        text = json.dumps({"error": {"type": type(error).__name__, "message": message}})
        print(text, file=sys.stderr)
    else:
        print(f"rollout: error: {message}", file=sys.stderr)
    return exit_code
