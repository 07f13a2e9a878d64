"""SharedTransport: one copy for all engines, which other processes fetch, and which nothing
leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from rollout import LoraAdapter
from rollout.coordinator.protocol.codec import decode, encode
from rollout.coordinator.protocol.messages import UpdateWeights
from rollout.errors import WeightUpdateError
from rollout.weights.source import TensorEntry, WeightsSource, pack_manifest
from rollout.weights.transports.registry import WeightFetcher
from rollout.weights.transports.shared import SharedTransport
from tests.lora_adapters import random_adapter
from tests.processes import PROCESSES
from tests.tiny_models import tiny_engine, tiny_model

WAIT_S = 30.0
ROOT = Path(__file__).parents[3]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b.weight": torch.randn(7, generator=generator).bfloat16(),
        "strided": torch.randn(4, 6, generator=generator).t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "ids": torch.arange(4),
    }


def over_the_wire(source: WeightsSource) -> WeightsSource:
    message = decode(encode(UpdateWeights(command_id=1, source=source)))
    assert isinstance(message, UpdateWeights)
    return message.source


def test_shared_fetch_returns_the_published_tensors() -> None:
    publisher = SharedTransport()
    fetched = WeightFetcher()(over_the_wire(publisher.publish(tensors())))
    publisher.close()
    assert fetched.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert fetched[name].dtype == tensor.dtype
        assert torch.equal(fetched[name], tensor), "also after the publisher gave it up"


def weight_files() -> int:
    """Other threads open and close descriptors of their own meanwhile."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if "rollout-weights" in os.readlink(descriptor):
                found.add(descriptor.stat().st_ino)
    return len(found)


def test_shared_transport_leaves_no_descriptor_after_many_updates() -> None:
    publisher = SharedTransport()
    before = weight_files()
    for num_kept in (1, *[2] * 50):
        publisher.publish(tensors())
        publisher.commit()
        assert weight_files() == before + num_kept
    publisher.close()
    assert weight_files() == before
    frugal = SharedTransport(reuses_memory=False)
    for _ in range(3):
        frugal.publish(tensors())
        frugal.commit()
        assert weight_files() == before + 1
    frugal.close()
    assert weight_files() == before


def file_of(source: WeightsSource) -> int:
    return Path(source.address.partition(" ")[0]).stat().st_ino


def test_shared_publish_reuses_memory_of_a_killed_reader() -> None:
    publisher = SharedTransport()
    source = publisher.publish({"w": torch.ones(1000)})
    publisher.commit()
    mine, theirs = PROCESSES.Pipe()
    reader = PROCESSES.Process(target=read_until_killed, args=(source, theirs))
    reader.start()
    theirs.close()
    try:
        assert mine.recv() == 1000.0
        publisher.publish({"w": torch.zeros(1000)})
        publisher.commit()
    finally:
        reader.kill()
        reader.join()
    assert file_of(publisher.publish({"w": torch.zeros(1000)})) == file_of(source)
    publisher.close()


def read_until_killed(source: WeightsSource, pipe: Any) -> None:
    view = WeightFetcher()(source)["w"]
    pipe.send(float(view.sum()))
    pipe.recv()


def test_shared_publish_names_a_tensor_that_cannot_be_copied() -> None:
    publisher = SharedTransport()
    with pytest.raises(WeightUpdateError, match="'bad'"):
        publisher.publish({"good": torch.ones(2), "bad": torch.empty(2, device="meta")})
    publisher.commit()
    assert publisher.committed is None


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (float("nan"), torch.float32),
        (float("inf"), torch.bfloat16),
        (float("-inf"), torch.float64),
    ],
)
def test_shared_publish_refuses_values_that_are_not_finite(
    value: float, dtype: torch.dtype
) -> None:
    bad = torch.ones(1000, dtype=dtype)
    bad[777] = value
    publisher = SharedTransport()
    before = weight_files()
    with pytest.raises(WeightUpdateError, match="'bad' holds NaN or infinity"):
        publisher.publish({"good": torch.ones(2), "bad": bad})
    publisher.commit()
    assert publisher.committed is None
    assert weight_files() == before
    lenient = SharedTransport(reject_non_finite=False)
    fetched = WeightFetcher()(lenient.publish({"bad": bad}))["bad"]
    assert torch.equal(fetched.isfinite(), bad.isfinite())
    lenient.close()


def test_tensors_checksum_is_verified_by_stage_weights() -> None:
    weights = dict(tiny_model(seed=3).named_parameters())
    publisher = SharedTransport()
    source = publisher.publish(weights | {"rotary_emb.inv_freq": torch.ones(3)})
    engine = tiny_engine(tiny_model(seed=4))
    assert engine.stage_weights(
        WeightFetcher()(source), source_checksum=source.tensors_checksum
    ).checksum
    half = publisher.publish({name: weight.bfloat16() for name, weight in weights.items()})
    assert half.tensors_checksum not in ("", source.tensors_checksum)
    assert engine.stage_weights(
        WeightFetcher()(half), source_checksum=half.tensors_checksum
    ).checksum
    with pytest.raises(WeightUpdateError, match=f"not {source.tensors_checksum} as announced"):
        engine.stage_weights(WeightFetcher()(half), source_checksum=source.tensors_checksum)
    publisher.close()


def test_shared_publish_takes_float8_and_float64() -> None:
    publisher = SharedTransport()
    eighth = torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)
    fetched = WeightFetcher()(publisher.publish({"w": eighth[:1], "d": torch.ones(2).double()}))
    assert fetched["w"].dtype == torch.float8_e4m3fn
    with pytest.raises(WeightUpdateError, match="'w' holds NaN"):
        publisher.publish({"w": eighth})
    publisher.close()


def test_shared_fetch_of_memory_being_rewritten_is_refused() -> None:
    publisher = SharedTransport()
    first = publisher.publish({"w": torch.ones(4)})
    publisher.commit()
    publisher.publish({"w": torch.zeros(4)})
    publisher.commit()
    refusals: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        with pytest.raises(WeightUpdateError, match="released for newer ones") as refusal:
            WeightFetcher()(first)  # into its memory these are written
        refusals.append(str(refusal.value))
        yield "w", torch.full((4,), 2.0)

    third = publisher.publish(weights())
    assert file_of(third) == file_of(first)
    assert refusals
    publisher.close()


@contextmanager
def source_at(descriptor: int, name: str) -> Iterator[WeightsSource]:
    """Of 16 bytes, in a file that is no publisher's."""
    publisher = SharedTransport()
    source = publisher.publish({"w": torch.ones(4)})
    try:
        yield structs.replace(source, address=f"/proc/{os.getpid()}/fd/{descriptor} {name}")
    finally:
        publisher.close()
        os.close(descriptor)


def test_shared_fetch_refuses_memory_of_another_push() -> None:
    descriptor = os.memfd_create("rollout-weights", os.MFD_CLOEXEC)
    os.write(descriptor, b"0" * 80)
    with (
        source_at(descriptor, "1" * 32) as source,
        pytest.raises(WeightUpdateError, match="released for newer ones"),
    ):
        WeightFetcher()(source)


def test_shared_fetch_refuses_a_file_of_another_name_or_size(tmp_path: Path) -> None:
    publisher = SharedTransport()
    source = publisher.publish({"w": torch.ones(4)})
    path, _, name = source.address.partition(" ")
    for other in ("", "rollout-weights", name[:-1], name + " (deleted)", f"{name} {name}"):
        with pytest.raises(WeightUpdateError, match="cannot be opened"):
            WeightFetcher()(structs.replace(source, address=f"{path} {other}"))
    ordinary = tmp_path / name
    ordinary.write_bytes(bytes(16))
    with pytest.raises(WeightUpdateError, match="cannot be opened"):
        WeightFetcher()(structs.replace(source, address=f"{ordinary} {name}"))
    larger = publisher.publish({"w": torch.ones(4), "x": torch.ones(4)})
    manifest = pack_manifest({"w": larger.entries()["w"]})
    with pytest.raises(WeightUpdateError, match="has 144 bytes, not 80"):
        WeightFetcher()(structs.replace(larger, manifest=manifest))
    publisher.close()


@pytest.mark.parametrize("name", ["", "pipe", "0" * 32])
@pytest.mark.parametrize("by_descriptor", [False, True])
def test_shared_fetch_of_a_pipe_does_not_block(
    tmp_path: Path, name: str, by_descriptor: bool
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    address = f"/proc/{os.getpid()}/fd/{descriptor}" if by_descriptor else str(path)
    source = WeightsSource(kind="shared", address=f"{address} {name}", manifest=b"", checksum="")
    errors: list[Exception] = []

    def fetch() -> None:
        try:
            WeightFetcher()(source)
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=fetch, daemon=True)
    reader.start()
    reader.join(WAIT_S)
    assert not reader.is_alive()
    os.close(descriptor)
    assert [type(error) for error in errors] == [WeightUpdateError]


@pytest.mark.parametrize(
    "change",
    [
        {"num_bytes": 64},
        {"offset": 10_000},
        {"offset": 2},
        {"dtype": "nonsense"},
        {"shape": (9,)},
        {"shape": (2**32, 2**32), "num_bytes": 0},
        {"shape": (2**62, 2**62, 0), "num_bytes": 0},
    ],
)
def test_shared_fetch_refuses_a_manifest_that_does_not_fit(change: dict[str, object]) -> None:
    publisher = SharedTransport()
    source = publisher.publish({"w": torch.ones(4), "behind it": torch.ones(4)})
    manifest = pack_manifest({"w": structs.replace(source.entries()["w"], **change)})
    with pytest.raises(WeightUpdateError, match="'w'"):
        WeightFetcher()(structs.replace(source, manifest=manifest))
    with pytest.raises(WeightUpdateError, match="kind 'carrier pigeon'"):
        WeightFetcher()(structs.replace(source, kind="carrier pigeon"))
    publisher.close()


def test_shared_fetch_from_another_process_ends_with_its_publisher() -> None:
    program = """
import sys, torch
from rollout.weights.transports.shared import SharedTransport
source = SharedTransport().publish({"w": torch.arange(5.0)})
print(source.address, flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        publisher = SharedTransport()
        here = publisher.publish({"w": torch.arange(5.0)})
        publisher.close()
        there = structs.replace(here, address=address)
        fetched = WeightFetcher()(there)["w"]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert torch.equal(fetched, torch.arange(5.0))
    with pytest.raises(WeightUpdateError, match="check that the trainer is running"):
        WeightFetcher()(there)


# ---- adapters


def test_shared_publish_of_an_adapter_sends_only_a_and_b() -> None:
    weights = dict(tiny_model("qwen2").named_parameters())
    adapter = random_adapter(weights, rank=2, use_rslora=True, dtype=torch.bfloat16)
    adapter = replace(adapter, alphas={"lm_head": 3})
    publisher = SharedTransport()
    source = over_the_wire(publisher.publish(adapter))
    assert sum(entry.num_bytes for entry in source.entries().values()) == sum(
        tensor.nbytes for tensor in adapter.tensors.values()
    )
    fetched = WeightFetcher()(source)
    assert isinstance(fetched, LoraAdapter)
    pairs = fetched.pairs()
    assert pairs.keys() == adapter.pairs().keys()
    for module, pair in adapter.pairs().items():
        assert pairs[module].scale == pair.scale
        assert torch.equal(pairs[module].a_RK, pair.a_RK)
        assert torch.equal(pairs[module].b_NR, pair.b_NR)
    engine, other = tiny_engine(tiny_model("qwen2")), tiny_engine(tiny_model("qwen2"))
    staged = engine.stage_weights(fetched, source_checksum=source.tensors_checksum)
    assert staged.checksum == other.stage_weights(adapter).checksum
    with pytest.raises(WeightUpdateError, match="have the checksum"):
        engine.stage_weights(fetched, source_checksum="0" * 16)
    publisher.close()


def test_shared_commit_keeps_the_weights_below_an_adapter() -> None:
    before = weight_files()
    adapter = random_adapter({"w.weight": torch.ones(4, 4)}, ["w"])
    publisher = SharedTransport()
    full = publisher.publish({"w.weight": torch.ones(4)})
    publisher.commit()
    for num_kept in (2, 3, 3):  # the last ones with a spare
        published = publisher.publish(adapter)
        publisher.commit()
        assert weight_files() == before + num_kept
    assert torch.equal(WeightFetcher()(full)["w.weight"], torch.ones(4))
    publisher.publish({"w.weight": torch.zeros(4)})
    publisher.commit()
    assert weight_files() == before + 2
    for gone in (full, published):
        with pytest.raises(WeightUpdateError, match="cannot be opened"):
            WeightFetcher()(gone)
    publisher.publish(adapter)
    publisher.commit()
    publisher.close()
    assert weight_files() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": {}}, "an adapter with a base"),
        ({"tensors": {"x.lora_A.weight": torch.ones(3, 2)}}, "not its lora_B"),
        ({"rank": 4}, "rank 4"),
    ],
)
def test_shared_publish_refuses_an_adapter_that_is_malformed(
    changes: dict[str, object], message: str
) -> None:
    adapter = random_adapter({"w.weight": torch.ones(4, 4)}, ["w"])
    before = weight_files()
    with pytest.raises(WeightUpdateError, match=message):
        SharedTransport().publish(replace(adapter, **changes))  # type: ignore[arg-type]
    assert weight_files() == before


def test_manifest_of_the_largest_mixtures_fits_a_message() -> None:
    entry = TensorEntry(dtype="bfloat16", shape=(2048, 7168), offset=2**41, num_bytes=2**25)
    names = (f"model.layers.{i % 61}.mlp.experts.{i // 61}.down_proj.weight" for i in range(10**5))
    source = WeightsSource(
        kind="shared", address="", manifest=pack_manifest(dict.fromkeys(names, entry)), checksum=""
    )
    assert len(over_the_wire(source).entries()) == 10**5
