"""Model directories with random weights and a tokenizer, for the benchmarks.

Used by `benchmarks.peers`, `benchmarks.serving` and `benchmarks.vllm_step`. Writes the directories
below the cache folder.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from benchmarks.models import M45, QWEN_05B, SMALL, transformers_model
from rollout.models.spec import parse_dtype

# Enough positions for a prompt of 2,048 tokens and its output.
_MAX_POSITIONS = 4096
_SHAPES = {
    "small": SMALL,
    "4M": replace(
        M45,
        vocab_size=4096,
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=704,
    ),
    "44M": M45,
    "0.5B": QWEN_05B,
}
# Factor on the usual initial weights. Without it, greedy decoding repeats one token whatever
# attention does; with it, nearly all greedy tokens differ.
_MATRIX_SCALE = 3.0
# Some peers refuse a model without an end token; requests ignore it.
_END_TOKEN_ID = 0
MODELS = {
    name: replace(spec, max_position_embeddings=_MAX_POSITIONS, eos_token_ids=(_END_TOKEN_ID,))
    for name, spec in _SHAPES.items()
}


def model_directory(name: str, dtype: str, cache: Path) -> Path:
    """Return the directory of the model `name` in `dtype`. Creates it below `cache` if needed."""
    spec = replace(MODELS[name], dtype=parse_dtype(dtype))
    folder = cache / "models" / f"{name}-{dtype}"
    if (folder / "complete").is_file():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = transformers_model(spec)
    with torch.no_grad():
        for name_of_weight, weight in model.named_parameters():
            if weight.dim() == 2 and "embed_tokens" not in name_of_weight:
                weight.mul_(_MATRIX_SCALE)
    model.to(spec.dtype).save_pretrained(folder)
    _trained_tokenizer(spec.vocab_size).save_pretrained(folder)
    (folder / "complete").touch()
    return folder


def _trained_tokenizer(vocab_size: int) -> Any:
    """Return a byte-level BPE tokenizer that is trained on the benchmarks' sources.

    The tokenizer has at most 4,096 tokens, fewer than some models.
    """
    # Prompts are token ids, so peers only check that there is a tokenizer.
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=min(vocab_size, 4096),
        special_tokens=["<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = sorted(str(path) for path in Path(__file__).parent.glob("*.py"))
    tokenizer.train(files, trainer)
    wrapper: Any = transformers.PreTrainedTokenizerFast
    return wrapper(tokenizer_object=tokenizer, eos_token="<end>")
