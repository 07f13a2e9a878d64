"""Hypothesis strategies of small engines and of their requests, and weights of each version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import strategies as st

from rollout import SamplingParams
from tests.engine.dense_model import DenseModel
from tests.engine.oracle import Rules
from tests.run_seed import run_seed
from tests.tiny_models import tiny_model

NUM_MODELS = 4
VOCAB = 24
# Prompts start alike, so that they find each other's blocks.
SHARED_TEXT = [3, 17, 4, 4, 9, 21, 0, 11, 5, 5, 8, 14, 2, 19, 7, 7, 1, 23, 10, 6]
MODES = (None, "persist", "offload", "recompute")
SAMPLERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "logprobs_mode": "temperature"},
    {"temperature": 1.3, "top_k": 5, "logprobs_mode": "processed"},
    {"temperature": 1.0, "min_p": 0.1},
)

END, BOS = 4, VOCAB - 1

tokens = st.integers(0, VOCAB - 1)


@dataclass(frozen=True, slots=True)
class Letters:
    """A tokenizer with one letter for each token: what matches as text matches as tokens."""

    eos_id: int | None
    bos_id: int = BOS
    vocab_size: int = VOCAB

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in ids)


letters = st.text("abcdefghijklmnopqrstuvwx"[:VOCAB], min_size=1, max_size=2)


@cache
def weights(index: int) -> tuple[Any, DenseModel]:
    """A transformers model and its dense reading. The versions take turns with a few of them.

    With heads of 16 the engine runs a pass in one call, with heads of 8 layer by layer.
    """
    model = tiny_model(
        "qwen3",
        seed=index,
        std=0.5,
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=(8, 16)[run_seed() % 2],
    )
    return model, DenseModel(model)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    """What `EngineMachine._add` cuts to what its engine and the prompt allow."""
    wants_scores = draw(st.integers(0, 5)) == 0
    limit = draw(st.sampled_from(("num_tokens_to_generate",) * 3 + ("num_tokens_total",)))
    return SamplingParams(
        **draw(st.sampled_from(SAMPLERS)),
        **{limit: draw(st.none() | st.integers(1, 30))},
        seed=draw(st.integers(0, 9)),
        termination_id=draw(st.sampled_from((None, None, None, END, -1))),
        ignore_eos=draw(st.integers(0, 7)) == 0,
        stop_token_ids=draw(st.none() | st.lists(st.sampled_from((END, 9)), max_size=2)),
        stop_words=draw(st.none() | st.lists(letters, min_size=1, max_size=2)),
        top_n_logprobs=draw(st.sampled_from((0, 0, 1, 3))),
        return_ranks=draw(st.booleans()),
        return_log_probs=draw(st.integers(0, 4)) > 0,
        skip_prompt_log_probs=not wants_scores,
    )


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Configs of an engine; `num_blocks` and `num_paused_blocks` become sizes in GiB."""
    config: dict[str, Any] = {
        "num_blocks": draw(st.integers(4, 20)),
        "num_paused_blocks": draw(st.sampled_from((None, None, 0, 2, 5, 10, 10))),
        "schedule_conservativeness": draw(st.sampled_from((None, 0.0, 0.5))),
        "block_size_tokens": draw(st.sampled_from((4, 4, 8))),
        "max_sequence_length": draw(st.sampled_from((32, 64))),
        "max_requests": draw(st.integers(2, 6)),
        "max_tokens": draw(st.integers(6, 40)),
        "enable_chunked_prefill": draw(st.booleans()),
        "kv_cache_management_mode": draw(st.sampled_from(MODES[1:])),
        "max_kv_staleness_versions": draw(st.sampled_from((None, None, None, 0, 1, 2))),
        "memory_kind": draw(st.sampled_from(("auto", "reserved", "device"))),
        "track_paused_request_events": draw(st.booleans()),
        "track_generated_token_events": draw(st.booleans()),
        "tokenizer": draw(st.sampled_from((None, Letters(None), Letters(END)))),
    }
    if draw(st.integers(0, 3)):
        config |= {
            "enable_prefix_caching": True,
            "prefix_caching_eviction_policy": draw(st.sampled_from(("ref_zero", "lru", "lru"))),
            "prefix_reuse_across_versions": draw(st.booleans()),
        }
    return config


def rules_of(config: dict[str, Any]) -> Rules:
    return Rules(
        block_size=config["block_size_tokens"],
        num_blocks=config["num_blocks"],
        max_length=config["max_sequence_length"],
        max_tokens=config["max_tokens"],
        chunked=config["enable_chunked_prefill"],
        max_paused_blocks=config["num_paused_blocks"],
        has_prefix_cache=config.get("enable_prefix_caching", False),
        is_isolated=not config.get("prefix_reuse_across_versions", False),
        max_age=config["max_kv_staleness_versions"],
        tracks_pauses=config["track_paused_request_events"],
        tracks_tokens=config["track_generated_token_events"],
        tokenizer=config["tokenizer"],
    )
