"""Contestants before they start: how each runs, in which precision, and who fits beside whom."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers_environments import OURS, PEERS, PeerRecipe, python_of, run_environment
from benchmarks.peers_process import WorkerProcess
from benchmarks.peers_results import INT8_SUFFIX
from benchmarks.peers_rounds import Contestant

# Of a model whose processes are all in memory at once. A peer holds about twice its weights.
_MAX_SHARED_PARAMETERS = 200_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contestant that has not started."""

    recipe: PeerRecipe
    precision: str

    @property
    def name(self) -> str:
        return self.recipe.name + (INT8_SUFFIX if self.precision == "int8" else "")

    def start(
        self, model: Path, num_threads: int, arguments: argparse.Namespace, stack: ExitStack
    ) -> Contestant:
        """Install it, convert the model, load it; `stack` will end its process.

        Raises PeerError.
        """
        logs = arguments.cache / "logs"
        python = python_of(self.recipe, arguments.cache, logs)
        environment = run_environment(self.recipe, num_threads)
        command = [str(python), "-m", self.recipe.module]
        log = logs / f"{self.name.lower().replace(' ', '-')}-{model.name}.log"
        if self.recipe.is_converted:
            with WorkerProcess(command, environment, log) as converter:
                model = self._converted(model, arguments, converter)
        worker = stack.enter_context(WorkerProcess(command, environment, log))
        request = {"verb": "load", "model": str(model), "precision": self.precision}
        worker.ask({**request, "num_threads": num_threads}, arguments.timeout)
        return Contestant(name=self.name, worker=worker, is_int8=self.precision == "int8")

    def _converted(
        self, model: Path, arguments: argparse.Namespace, converter: WorkerProcess
    ) -> Path:
        """The model in the peer's own form, made unless it is there."""
        folder = f"{model.name}-{self.precision}-{self.recipe.name}-{self.recipe.version}"
        target: Path = arguments.cache / "converted" / folder.lower().replace(" ", "-")
        complete = target / "complete"
        if not complete.is_file():
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            folders = {"model": str(model), "target": str(target)}
            request = {"verb": "convert", **folders, "precision": self.precision}
            converter.ask(request, arguments.timeout)
            complete.touch()
        return target


def entries(peers: Sequence[str], dtype: str, *, has_int8: bool) -> list[Entry]:
    """Ours first, then the peers, then those with weights of int8."""
    recipes = [PEERS[name] for name in peers]
    exact = [Entry(recipe=recipe, precision=dtype) for recipe in (OURS, *recipes)]
    narrow = [Entry(recipe=r, precision="int8") for r in recipes if r.is_converted and has_int8]
    return exact + narrow


def in_groups(peers: Sequence[Entry], num_parameters: int) -> list[list[Entry]]:
    """All peers together, or one after the other beside ours where the model is large."""
    if num_parameters > _MAX_SHARED_PARAMETERS:
        return [[peer] for peer in peers]
    return [list(peers)]
