"""Checkpoint: reads Hugging Face directories of config.json and *.safetensors files.

Used by `loading`, `dequantized` and `writer` in this folder, by `rollout.weights` for LoRA adapters
and for pushes through a directory, by `announcement` and `checkpoints` in `rollout.serve.control`,
by `rollout_verl.server` and by `rollout_vllm`. Pickled checkpoints are never opened, because
unpickling runs code. Only `write_directory` writes files.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollout.errors import ModelError
from rollout.json_files import read_object
from rollout.models.spec import end_ids_of, union_of_ids

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_EMBEDDINGS = "model.embed_tokens.weight"  # no checkpoint quantises it
_MAPPED_BYTES = 8 << 20  # tensors' bytes to read before the file is mapped again


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a directory. `shards` has the tensors' names by file. Values are read on
    demand."""

    shards: dict[Path, list[str]]

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Return the checkpoint in `directory`, from its single file or from the files of its
        index. Raises ModelError naming a file that is missing or broken."""
        single, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
        if single.is_file():
            return cls({single: tensor_names(single)})
        if not index.is_file():
            raise ModelError(
                f"{directory} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; pickled weights are not "
                "read: save the model with save_pretrained(..., safe_serialization=True)"
            )
        return cls(_indexed_shards(index))

    def keys(self) -> Collection[str]:
        """Return the names of all tensors."""
        return [name for names in self.shards.values() for name in names]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each name with its tensor, a view of the mapped file. Raises ModelError naming a
        file that cannot be read."""
        for path, names in self.shards.items():
            yield from read_tensors(path, names)


def read_config(directory: Path) -> dict[str, Any]:
    """Return config.json of `directory`, completed from generation_config.json and the weights.

    If generation_config.json exists, `eos_token_id` becomes a list of the end tokens of both files.
    Chat models list some end tokens only there. A config without a dtype, as gpt-oss and MiniMax-M2
    have, gets the dtype of the embeddings. Raises ModelError if config.json is missing or a file is
    not valid.
    """
    config = read_json(directory / CONFIG_FILE)
    if config.get("dtype") is None and config.get("torch_dtype") is None:
        config["dtype"] = _dtype_of_embeddings(directory)
    generation_path = directory / GENERATION_FILE
    if generation_path.is_file():
        generation = read_json(generation_path)
        config["eos_token_id"] = union_of_ids(
            end_ids_of(config, str(directory / CONFIG_FILE)),
            end_ids_of(generation, str(generation_path)),
        )
    return config


def _dtype_of_embeddings(directory: Path) -> torch.dtype | None:
    """Return the dtype of the embeddings; None if the directory has no weights or no embeddings."""
    is_complete = any((directory / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE))
    shards = Checkpoint.open(directory).shards if is_complete else {}
    path = next((path for path, names in shards.items() if _EMBEDDINGS in names), None)
    return None if path is None else read_tensor(path, _EMBEDDINGS).dtype


def write_directory(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors to `directory`, which is created if necessary. The
    tensors must be contiguous and must not share memory."""
    directory.mkdir(parents=True, exist_ok=True)
    # transformers refuses a file whose metadata names no framework.
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_tensor(path: Path, name: str) -> Tensor:
    """Return tensor `name`, a view of the mapped file. Raises ModelError if the file cannot be
    read."""
    _, tensor = next(read_tensors(path, [name]))
    return tensor


def read_tensors(path: Path, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield each name with its tensor, a view of the mapped file. Raises ModelError if the file
    cannot be read."""
    # The file is mapped again after some tensors: pages that were read count as memory of this
    # process until they are unmapped, and a shard may be as large as the model. Not after each
    # tensor: opening a file parses all its names, which takes a millisecond.
    start = 0
    while start < len(names):
        num_bytes = 0
        try:
            with safe_open(path, framework="pt") as shard:
                while start < len(names) and num_bytes < _MAPPED_BYTES:
                    tensor: Tensor = shard.get_tensor(names[start])
                    num_bytes += tensor.nbytes
                    yield names[start], tensor
                    start += 1
        except (SafetensorError, OSError) as error:
            raise _broken(path, error) from error
        del tensor


def tensor_names(path: Path) -> list[str]:
    """Return the names of the tensors in a file. Raises ModelError if the file cannot be read."""
    try:
        with safe_open(path, framework="pt") as shard:
            return list(shard.keys())
    except (SafetensorError, OSError) as error:
        raise _broken(path, error) from error


def _indexed_shards(index: Path) -> dict[Path, list[str]]:
    """Return the tensors' names by file, as the index lists them. Raises ModelError if the index is
    invalid, or if a file or a listed tensor is missing."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index} has no weight_map; download or save the checkpoint again")
    shards: dict[Path, list[str]] = {}
    for name, file_name in weight_map.items():
        if Path(file_name).name != file_name:
            raise ModelError(
                f"{index} puts {name!r} into {file_name!r}; a shard must be a file of its directory"
            )
        shards.setdefault(index.parent / file_name, []).append(name)
    for path, names in shards.items():
        if not path.is_file():
            raise ModelError(f"shard {path} is missing; download or save the checkpoint again")
        if absent := sorted(set(names) - set(tensor_names(path))):
            raise ModelError(
                f"shard {path} lacks {absent[0]!r}, which {index.name} puts there; "
                "download or save the checkpoint again"
            )
    return shards


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ModelError if the file is missing or invalid."""
    if not path.is_file():
        raise ModelError(f"{path} is missing; expected a Hugging Face model directory")
    return read_object(path, ModelError)


def _broken(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path} cannot be read ({error}); download or save it again")
