"""DirectoryTransport: checkpoints in safetensors files, valid once they are whole."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec import structs
from safetensors import safe_open

from rollout.errors import ModelError, WeightUpdateError
from rollout.models.checkpoints.reader import INDEX_FILE, Checkpoint
from rollout.models.checkpoints.writer import CheckpointWriter, map_tensors
from rollout.weights.transports.directory import DirectoryTransport
from rollout.weights.transports.registry import WeightFetcher
from rollout.weights.update import by_name


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b.weight": torch.randn(7, generator=generator).bfloat16(),
        "c": torch.randn(4, 6, generator=generator).t(),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False, True]),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "ids": torch.arange(4),
        "scalar": torch.tensor(2.5),
    }


def check_equal(read: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name].double(), tensor.double())


def test_directory_publish_writes_files_that_safe_open_reads(tmp_path: Path) -> None:
    transport = DirectoryTransport(tmp_path)
    source = transport.publish(tensors())
    check_equal(dict(Checkpoint.open(Path(source.address)).items()), tensors())
    for file in Path(source.address).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}, "transformers asks for it"
    check_equal(by_name(WeightFetcher()(source)), tensors())
    transport.close()


def test_checkpoint_writer_begins_a_new_file_when_one_is_full(tmp_path: Path) -> None:
    many = {f"{'long' * 40}.{i}": torch.full((3,), float(i)) for i in range(500)}
    with CheckpointWriter(tmp_path, max_file_bytes=2000) as writer:
        for name, tensor in many.items():
            writer.write(name, tensor)
    writer.write_index({})
    assert len(list(tmp_path.glob("*.safetensors"))) == 4, "166 tensors of 12 bytes in each"
    check_equal(dict(Checkpoint.open(tmp_path).items()), many)
    fits_no_header = tmp_path / "full"
    fits_no_header.mkdir()
    with CheckpointWriter(fits_no_header) as writer:
        for name, tensor in many.items():
            writer.write(name, tensor)
    writer.write_index({})
    assert len(list(fits_no_header.glob("*.safetensors"))) > 1
    check_equal(dict(Checkpoint.open(fits_no_header).items()), many)


def test_directory_fetch_refuses_an_incomplete_or_other_push(tmp_path: Path) -> None:
    transport = DirectoryTransport(tmp_path)
    source = transport.publish(tensors())
    for other in ("relative", str(tmp_path / "nowhere"), str(tmp_path)):
        with pytest.raises(WeightUpdateError, match="cannot be read"):
            WeightFetcher()(structs.replace(source, address=other))
    with pytest.raises(WeightUpdateError, match="the checksum is"):
        WeightFetcher()(structs.replace(source, tensors_checksum="0" * 16))
    index = Path(source.address, INDEX_FILE)
    index.rename(index.with_suffix(".away"))
    with pytest.raises(WeightUpdateError, match=f"{INDEX_FILE} is missing"):
        WeightFetcher()(source)
    index.with_suffix(".away").rename(index)
    file = next(Path(source.address).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightUpdateError, match="cannot be read"):
        WeightFetcher()(source)
    transport.close()


def test_directory_transport_leaves_only_the_last_committed_push(
    tmp_path: Path,
) -> None:
    transport = DirectoryTransport(tmp_path)
    for _ in range(3):
        source = transport.publish(tensors())
        transport.commit()
        assert transport.committed is source
        assert [str(path) for path in tmp_path.iterdir()] == [source.address]
    transport.publish(tensors())
    transport.roll_back()
    assert [str(path) for path in tmp_path.iterdir()] == [source.address]
    with pytest.raises(WeightUpdateError, match="'bad'"):
        transport.publish({"a": torch.ones(3), "bad": torch.ones(3, device="meta")})
    with pytest.raises(WeightUpdateError, match="complex64, which safetensors files cannot store"):
        transport.publish({"a": torch.ones(3, dtype=torch.complex64)})
    assert [str(path) for path in tmp_path.iterdir()] == [source.address]
    transport.close()
    transport.close()
    assert not list(tmp_path.iterdir())


def test_directory_publish_on_a_full_disk_raises_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: CheckpointWriter, name: str, values: torch.Tensor) -> None:
        raise OSError(28, "No space left on device")

    transport = DirectoryTransport(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "write", write)
        with pytest.raises(WeightUpdateError, match=r"cannot be written.*No space left"):
            transport.publish(tensors())
    assert not list(tmp_path.iterdir())
    transport.publish(tensors())
    transport.close()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in a file system of this host's memory."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


def test_map_tensors_refuses_a_file_that_is_being_rewritten(memory: Path) -> None:
    transport = DirectoryTransport(memory)
    for value in (1.0, 2.0):
        source = transport.publish({"w": torch.full((1000,), value)})
        transport.commit()

    refusals = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.full((1000,), 3.0)
        (being_written,) = set(memory.glob("push-*/*")) - set(Path(source.address).iterdir())
        with pytest.raises(ModelError, match="cannot be read") as refusal:
            map_tensors(being_written)
        refusals.append(refusal)
        yield "v", torch.zeros(3)

    transport.publish(weights())
    assert refusals
    transport.close()


def test_directory_index_has_size_and_checksum(tmp_path: Path) -> None:
    transport = DirectoryTransport(tmp_path)
    source = transport.publish({"a": torch.ones(3), "b": torch.ones(2)})
    index = json.loads(Path(source.address, INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": 20, "tensors_checksum": source.tensors_checksum}
    transport.close()
