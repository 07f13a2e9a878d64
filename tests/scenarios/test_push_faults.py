"""Random faults in pushes: the served weights are always those of one committed push."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout import WeightUpdateError
from rollout.weights.transports.directory import DirectoryTransport
from tests.contracts.weight_fleet import TRANSPORTS, WeightFleet
from tests.run_seed import run_seed
from tests.tiny_models import IS_LONG, tiny_engine, tiny_model

NUM_PUSHES = 40 if IS_LONG else 4  # for each of the transports
Weights = dict[str, Tensor]
ChangeSource = Callable[[Weights, str], Any]


def weights(seed: int) -> Weights:
    return dict(tiny_model(seed=seed).named_parameters())


@cache
def checksum(seed: int) -> str:
    return tiny_engine(tiny_model(seed=seed)).weights_checksum()


def not_finite(given: Weights, name: str) -> Weights:
    bad = given[name].detach().clone()
    bad.view(-1)[-1] = float("nan")
    return given | {name: bad}


def cut_off(given: Weights, name: str) -> Iterator[tuple[str, Tensor]]:
    """Let the trainer fail before a tensor, in the middle of the stream."""
    for other, tensor in given.items():
        if other == name:
            raise OSError("a rank of the trainer was lost")
        yield other, tensor


SOURCES: dict[str, ChangeSource] = {
    "missing": lambda given, name: {n: tensor for n, tensor in given.items() if n != name},
    "extra": lambda given, name: given | {f"{name}.more": torch.ones(1)},
    "misshapen": lambda given, name: given | {name: given[name].detach()[:-1]},
    "not finite": not_finite,
    "cut off": cut_off,
    "twice": lambda given, name: iter([*given.items(), (name, given[name])]),
    "no values": lambda given, name: given | {name: torch.empty_like(given[name], device="meta")},
}


def refuse() -> None:
    raise WeightUpdateError("no memory to stage in")


def damage(root: Path, random: Random) -> None:
    """Change one byte of what was published, or cut a file off."""
    path = random.choice(sorted(root.rglob("*.safetensors"), key=lambda p: p.stat().st_mtime)[-1:])
    with path.open("r+b") as file:
        size = path.stat().st_size
        if random.random() < 0.5:
            file.truncate(size - random.randrange(1, 64))
        else:
            place = size - 1 - random.randrange(1024)
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ (1 << random.randrange(8))]))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_random_faults_of_pushes_leave_one_committed_version_on_all_engines(
    kind: str, tmp_path: Path
) -> None:
    random = Random(f"{run_seed()} {kind}")
    with WeightFleet(TRANSPORTS[kind](tmp_path)) as fleet:
        fleet.push(weights(1))
        served = checksum(1)
        kinds = [*SOURCES, "member refuses"]
        if isinstance(fleet.transport, DirectoryTransport):
            kinds.append("damaged")
        for turn in range(NUM_PUSHES):
            fault, seed = random.choice(kinds), 1 + (turn + 1) % 5
            source: Any = weights(seed)
            name, member = random.choice([*source]), random.choice(fleet.members)
            if fault in SOURCES:
                source = SOURCES[fault](source, name)
            elif fault == "damaged":
                member.hinder = lambda: damage(tmp_path, random)
            else:
                member.hinder = refuse
            with pytest.raises(WeightUpdateError):
                fleet.push(source)
            assert fleet.checksums() == [served] * 2, f"{fault} at {name}"
            member.hinder = lambda: None
            if random.random() < 0.5:  # the next push works, after one fault or after several
                fleet.push(weights(seed))
                served = checksum(seed)
                assert fleet.checksums() == [served] * 2, f"after {fault} at {name}"
