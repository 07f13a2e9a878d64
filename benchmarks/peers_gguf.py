"""From a Hugging Face directory to a GGUF file, in llama.cpp's environment: without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

FILE = "model.gguf"
_ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
_FILE_TYPES = {
    "float32": (gguf.LlamaFileType.ALL_F32, gguf.GGMLQuantizationType.F32),
    "bfloat16": (gguf.LlamaFileType.MOSTLY_BF16, gguf.GGMLQuantizationType.BF16),
    "int8": (gguf.LlamaFileType.MOSTLY_Q8_0, gguf.GGMLQuantizationType.Q8_0),
}


def write_gguf(model: Path, target: Path, precision: str) -> None:
    """Write the model to a file in `target`, without a tokenizer; vectors stay in float32."""
    config = json.loads((model / "config.json").read_text())
    architecture = _ARCHITECTURES[config["model_type"]]
    file_type, matrix_type = _FILE_TYPES[precision]
    writer = gguf.GGUFWriter(target / FILE, gguf.MODEL_ARCH_NAMES[architecture])
    _add_sizes(writer, config)
    writer.add_file_type(file_type)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in _tensors(model / "model.safetensors"):
        values = _for_paired_rotation(name, tensor, config)
        kind = matrix_type if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        stored = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(new_name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _tensors(path: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The tensors of a safetensors file in float32; NumPy itself has no bfloat16."""
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
    raw = np.memmap(path, mode="r", dtype=np.uint8, offset=8 + header_size)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        values = raw[start:end]
        if entry["dtype"] == "BF16":
            wide = values.view(np.uint16).astype(np.uint32) << 16
            yield name, wide.view(np.float32).reshape(entry["shape"])
        else:
            yield name, values.view(np.float32).reshape(entry["shape"])


def _for_paired_rotation(
    name: str, tensor: NDArray[np.float32], config: dict[str, Any]
) -> NDArray[np.float32]:
    """Rows of Llama's query and key in the order in which llama.cpp rotates neighbours."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = next((part for part in heads if part in name), None)
    if config["model_type"] != "llama" or part is None:
        return tensor
    num_heads = config[heads[part]]
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)
