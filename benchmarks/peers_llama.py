"""The process of llama.cpp in `benchmarks.peers`.

Started by `benchmarks.peers_environments`, and answers requests on stdin. Calls llama.cpp's C
functions, and samples with NumPy.

Shape letters: R rows, V tokens of the vocabulary, P parts of the vocabulary, W tokens of a part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from benchmarks.peers_worker import MAX_NUM_SEQUENCES, serve
from benchmarks.workloads import Generated, Workload

FILE = "model.gguf"
_ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
_FILE_TYPES = {
    "float32": (gguf.LlamaFileType.ALL_F32, gguf.GGMLQuantizationType.F32),
    "bfloat16": (gguf.LlamaFileType.MOSTLY_BF16, gguf.GGMLQuantizationType.BF16),
    "int8": (gguf.LlamaFileType.MOSTLY_Q8_0, gguf.GGMLQuantizationType.Q8_0),
}


def write_gguf(model: Path, target: Path, precision: str) -> None:
    """Write a Hugging Face model to a GGUF file in the folder `target`, without its tokenizer.

    Matrices have the type of `precision`, and vectors have float32.
    """
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
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
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
    """Yield the names and tensors of a safetensors file, in float32."""
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
    raw = np.memmap(path, mode="r", dtype=np.uint8, offset=8 + header_size)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        values = raw[start:end]
        if entry["dtype"] == "BF16":  # NumPy has no bfloat16
            wide = values.view(np.uint16).astype(np.uint32) << 16
            yield name, wide.view(np.float32).reshape(entry["shape"])
        else:
            yield name, values.view(np.float32).reshape(entry["shape"])


def _for_paired_rotation(
    name: str, tensor: NDArray[np.float32], config: dict[str, Any]
) -> NDArray[np.float32]:
    """Return the tensor, with the rows of Llama's query and key projections reordered."""
    # llama.cpp applies rotary embeddings to neighbouring rows.
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = next((part for part in heads if part in name), None)
    if config["model_type"] != "llama" or part is None:
        return tensor
    num_heads = config[heads[part]]
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


_MAX_BATCHED_TOKENS = 2048
_CONTEXT_TOKENS = 16_384  # tokens of all sequences together, which share one KV cache
_KV_TYPES = {
    "float32": GGMLQuantizationType.F32,
    "bfloat16": GGMLQuantizationType.BF16,
    "int8": GGMLQuantizationType.F32,
}
_DRAW_WIDTH = 256  # tokens of a part of the vocabulary; all vocabularies are multiples of 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A token of one sequence in a batch.

    wants_logits: whether the next token is sampled after this token.
    """

    token: int
    position: int
    sequence_id: int
    wants_logits: bool = True


class LlamaCpp:
    """llama.cpp's engine. Each sample is a sequence of one context."""

    def load(self, model: Path, precision: str, num_threads: int) -> None:
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        path = str(model / FILE).encode()
        self._model = llama_cpp.llama_model_load_from_file(path, options)
        if self._model is None:
            raise RuntimeError(f"llama.cpp cannot load {FILE}")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = _CONTEXT_TOKENS
        context.n_batch = _MAX_BATCHED_TOKENS
        # Flash attention decodes W2 a third slower and W3 a fifth; it prefills W4 a fifth faster.
        context.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context.n_seq_max = MAX_NUM_SEQUENCES
        context.n_threads = context.n_threads_batch = num_threads
        context.type_k = context.type_v = _KV_TYPES[precision]
        context.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        if self._context is None:
            raise RuntimeError(f"llama.cpp cannot run {precision} here")
        self._memory = llama_cpp.llama_get_memory(self._context)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(_MAX_BATCHED_TOKENS, 0, 1)

    def generate(self, workload: Workload, seed: int) -> Generated:
        llama_cpp.llama_memory_clear(self._memory, False)
        sampler = _Sampler(workload, seed)
        num_samples = workload.num_samples
        lengths = [n for n in workload.output_lens for _ in range(num_samples)]
        logits = np.repeat(self._prefill(workload), num_samples, axis=0)
        tokens: list[list[int]] = [[] for _ in lengths]
        logprobs: list[list[float]] = [[] for _ in lengths]
        running = list(range(len(lengths)))
        while True:
            drawn, scores = sampler.draw(logits)
            for index, token, score in zip(running, drawn, scores, strict=True):
                tokens[index].append(token)
                logprobs[index].append(score)
            running = [index for index in running if len(tokens[index]) < lengths[index]]
            if not running:
                break
            logits = self._decode(
                [
                    _Row(
                        token=tokens[index][-1],
                        position=len(workload.prompts[index // num_samples])
                        + len(tokens[index])
                        - 1,
                        sequence_id=index,
                    )
                    for index in running
                ]
            )
        return Generated(tokens=tokens, logprobs=logprobs if workload.wants_logprobs else None)

    def _prefill(self, workload: Workload) -> NDArray[np.float32]:
        """Return the logits after each prompt. Each prompt is computed once for all its samples."""
        parts: list[NDArray[np.float32]] = []
        rows: list[_Row] = []
        for index, prompt in enumerate(workload.prompts):
            if rows and len(rows) + len(prompt) > _MAX_BATCHED_TOKENS:
                parts.append(self._decode(rows).copy())
                rows = []
            rows += _prompt_rows(prompt, index * workload.num_samples)
        parts.append(self._decode(rows).copy())
        for index in range(len(workload.prompts)):
            first = index * workload.num_samples
            for other in range(first + 1, first + workload.num_samples):
                llama_cpp.llama_memory_seq_cp(self._memory, first, other, -1, -1)
        return np.concatenate(parts)

    def _decode(self, rows: Sequence[_Row]) -> NDArray[np.float32]:
        """Run a batch, and return the logits of the rows with `wants_logits`.

        The logits are a view that is valid until the next batch.
        """
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, row in enumerate(rows):
            batch.token[index] = row.token
            batch.pos[index] = row.position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row.sequence_id
            batch.logits[index] = row.wants_logits
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        num_rows = sum(row.wants_logits for row in rows)
        pointer = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, shape=(num_rows, self._vocab_size))


def _prompt_rows(prompt: Sequence[int], sequence_id: int) -> list[_Row]:
    return [
        _Row(
            token=token,
            position=position,
            sequence_id=sequence_id,
            wants_logits=position == len(prompt) - 1,
        )
        for position, token in enumerate(prompt)
    ]


class _Sampler:
    """Samples one token per row, at temperature 1 or greedily."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._is_greedy = workload.temperature == 0
        self._random = np.random.default_rng(seed)

    def draw(self, logits_RV: NDArray[np.float32]) -> tuple[list[int], list[float]]:
        """Return one token per row, and its log-prob. Greedy tokens have log-prob 0."""
        if self._is_greedy:
            return logits_RV.argmax(axis=1).tolist(), [0.0] * len(logits_RV)
        # Samples a part of the vocabulary by its summed probability, then a token of this part.
        # So only one part needs a cumulative sum.
        num_rows, vocab_size = logits_RV.shape
        rows = np.arange(num_rows)
        weights_RV = np.exp(logits_RV - logits_RV.max(axis=1, keepdims=True))
        starts = np.arange(0, vocab_size, _DRAW_WIDTH)
        ends_RP = np.add.reduceat(weights_RV, starts, axis=1).cumsum(axis=1, dtype=np.float64)
        total_R = ends_RP[:, -1]
        wanted_R = self._random.random(num_rows) * total_R
        part_R = (ends_RP <= wanted_R[:, None]).sum(axis=1)
        before_R = np.where(part_R > 0, ends_RP[rows, part_R - 1], 0.0)
        columns_RW = starts[part_R][:, None] + np.arange(_DRAW_WIDTH)
        columns_RW = np.minimum(columns_RW, vocab_size - 1)
        inside_RW = weights_RV[rows[:, None], columns_RW].cumsum(axis=1, dtype=np.float64)
        place_R = (inside_RW <= (wanted_R - before_R)[:, None]).sum(axis=1)
        tokens_R = columns_RW[rows, np.minimum(place_R, _DRAW_WIDTH - 1)]
        logprobs_R = np.log(weights_RV[rows, tokens_R] / total_R)
        return tokens_R.tolist(), logprobs_R.tolist()


if __name__ == "__main__":
    serve(LlamaCpp(), write_gguf)
