"""Processes of a clean interpreter, which imports the main module only if it must."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

# Not a fork: torch's threads and CUDA do not survive one.
_PROCESSES = multiprocessing.get_context("spawn")
_MAIN = "__main__"
_leaving_out = threading.Lock()


def start_clean_process(
    run: Callable[..., object], *arguments: Any, name: str, imports_main: bool
) -> tuple[BaseProcess, Connection]:
    """Start `run(pipe, *arguments)`. Returns its process and this end of the pipe.

    Without `imports_main` the module that the program was started with is not imported there: it
    may take seconds, and need not guard its start by `if __name__ == "__main__":`.
    """
    ours, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=run, args=(theirs, *arguments), name=name, daemon=True)
    with theirs, contextlib.nullcontext() if imports_main else _main_left_out():
        process.start()
    return process, ours


def mentions_main(pickled: bytes) -> bool:
    """Whether something in there may be defined in the program's main module."""
    return _MAIN.encode() in pickled


def needs_main(value: Any) -> bool:
    """`mentions_main` of a value that multiprocessing may be able to pickle where pickle is not."""
    try:
        return mentions_main(pickle.dumps(value))
    except Exception:
        return True


@contextlib.contextmanager
def _main_left_out() -> Iterator[None]:
    """multiprocessing finds no main module whose path a child could import meanwhile."""
    with _leaving_out:
        main = sys.modules[_MAIN]
        sys.modules[_MAIN] = _WithoutPath(main)
        try:
            yield
        finally:
            sys.modules[_MAIN] = main


class _WithoutPath(ModuleType):
    """The main module for all that is looked up in it, say by a thread that pickles, but its path.

    A new module's `__spec__` is None.
    """

    def __init__(self, main: ModuleType) -> None:
        super().__init__(_MAIN)
        self._main = main

    def __getattr__(self, name: str) -> Any:
        if name == "__file__":
            raise AttributeError(name)
        return getattr(self._main, name)
