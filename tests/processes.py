"""Processes of a test's own, forked from one that has imported what they run and done nothing else.

As clean as spawned ones, but each is there at once.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from subprocess import CompletedProcess

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["rollout.apis.engine_process", "benchmarks.coordinator_fleet"])


def run_program(source: str, arguments: list[str], directory: Path) -> CompletedProcess[str]:
    """`python -c SOURCE ARGUMENTS...` in `directory`, in a process that has imported torch.

    What it prints passes through two files beside `directory`.
    """
    paths = [directory.with_name(f"{directory.name}.{name}") for name in ("stdout", "stderr")]
    process = PROCESSES.Process(target=_be_program, args=(source, arguments, directory, paths))
    process.start()
    process.join()
    output, errors = (path.read_text() for path in paths)
    return CompletedProcess(arguments, process.exitcode or 0, output, errors)


def _be_program(source: str, arguments: list[str], directory: Path, paths: list[Path]) -> None:
    for descriptor, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(directory)
    sys.argv = ["-c", *arguments]
    exec(source, {"__name__": "__main__"})
