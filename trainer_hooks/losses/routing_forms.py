"""Converts recorded routing to and from the forms of verl, slime, prime-rl, NeMo-RL and SGLang.

Used by `rollout_verl.server` (`without_unknown`) and by users' integrations. No function has side
effects.

This project's forms are `request.routing_indices`, int16 [tokens - 1, L, K], and
`RolloutBatch.routing_BTLK`, int16 [B, T, L, K], padded on the right. Both forms contain only layers
with experts, and -1 for a token whose experts are unknown. A form without -1 gets the experts 0 ..
K - 1 for unknown tokens and padding.

Shape letters: P positions of a request, S positions of verl's padded row, B rows, T positions of a
RolloutBatch, L layers with experts, A all layers, K experts of a token.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rollout.errors import ConfigError
from rollout.requests.routing import UNKNOWN, is_known

_BYTES_DTYPES = ("uint8", "uint16", "int8", "int16", "int32")


# ---- what the forms share


def without_unknown(routing: torch.Tensor) -> torch.Tensor:
    """Return a copy with the experts 0 .. K - 1 where experts are unknown."""
    top_k = torch.arange(routing.shape[-1], dtype=routing.dtype, device=routing.device)
    return torch.where(_is_row(routing), routing, top_k)


def duplicates_unknown(routing: torch.Tensor) -> torch.Tensor:
    """Return a copy with -1 where a token has an expert twice, which no router chooses."""
    ordered = routing.sort(dim=-1).values
    is_twice = (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1, keepdim=True)
    return routing.masked_fill(is_twice, UNKNOWN)


def all_layers(routing: torch.Tensor, moe_layers: Sequence[int], num_layers: int) -> torch.Tensor:
    """Return routing [..., L, K] as [..., A, K] with zeros in dense layers.

    `moe_layers`: indices of the layers with experts. Raises ConfigError for other layers.
    """
    shape = *routing.shape[:-2], num_layers, routing.shape[-1]
    _require(
        len(moe_layers) == routing.shape[-2] and max(moe_layers, default=0) < num_layers,
        f"moe_layers={list(moe_layers)} of {num_layers} are not the {routing.shape[-2]} layers of "
        f"routing of shape {list(routing.shape)}",
    )
    return routing.new_zeros(shape).index_copy_(-2, torch.tensor(moe_layers), routing)


def moe_layers_only(routing: torch.Tensor, moe_layers: Sequence[int]) -> torch.Tensor:
    """Return routing [..., A, K] as [..., L, K], without dense layers.

    `moe_layers`: indices of the layers with experts. Raises ConfigError for other layers.
    """
    _require(
        max(moe_layers, default=0) < routing.shape[-2],
        f"moe_layers={list(moe_layers)} are not among the {routing.shape[-2]} layers of routing of "
        f"shape {list(routing.shape)}",
    )
    return routing[..., list(moe_layers), :]


# ---- verl: `routed_experts` of a batch, prompts left padded and responses right padded


def to_verl(
    routing_BTLK: torch.Tensor,
    prompt_lengths_B: torch.Tensor,
    max_prompt_length: int,
    max_response_length: int,
) -> torch.Tensor:
    """Return verl's `routed_experts` [B, S, L, K]. S is the sum of the two maximum lengths.

    Each row starts where its prompt starts in verl's `input_ids`. Raises ConfigError for lengths
    that do not fit.
    """
    num_rows, num_positions, *of_row = routing_BTLK.shape
    starts = [max_prompt_length - int(length) for length in prompt_lengths_B]
    _require(
        len(starts) == num_rows and min(starts, default=0) >= 0,
        f"max_prompt_length={max_prompt_length} with prompts of {prompt_lengths_B.tolist()} tokens "
        f"for routing of {num_rows} rows; it must be the longest prompt's length at least",
    )
    size = max_prompt_length + max_response_length
    verl_BSLK = routing_BTLK.new_full((num_rows, size, *of_row), UNKNOWN)
    for row, start in enumerate(starts):
        taken = min(num_positions, size - start)
        left = routing_BTLK[row, taken:]
        _require(
            not bool(is_known(left).any()),
            f"row {row} has routing of more than max_response_length={max_response_length} tokens",
        )
        verl_BSLK[row, start : start + taken] = routing_BTLK[row, :taken]
    return without_unknown(verl_BSLK)


def from_verl(routed_experts: torch.Tensor, attention_mask_BS: torch.Tensor) -> torch.Tensor:
    """Return `routing_BTLK` from verl's `routed_experts` and `attention_mask`, padded on the left.

    T is the largest number of tokens of a row. A row's last token has -1, since no pass computed
    it.
    """
    _require(
        routed_experts.dim() == 4 and routed_experts.shape[:2] == attention_mask_BS.shape,
        f"routed_experts of shape {list(routed_experts.shape)} and attention_mask of shape "
        f"{list(attention_mask_BS.shape)} must be [B, S, L, K] and [B, S]",
    )
    is_token_BS = attention_mask_BS.bool()
    lengths = is_token_BS.sum(dim=1).tolist()
    shape = len(lengths), max(lengths, default=0), *routed_experts.shape[2:]
    routing_BTLK = torch.full(shape, UNKNOWN, dtype=torch.int16)
    for row, length in enumerate(lengths):
        own_TLK = routed_experts[row][is_token_BS[row]].to(torch.int16)
        routing_BTLK[row, : max(length - 1, 0)] = own_TLK[:-1]
    return duplicates_unknown(routing_BTLK)


# ---- slime: `rollout_routed_experts` of a sample, int32 [tokens - 1, layers, K]


def to_slime(routing_PLK: torch.Tensor) -> np.ndarray:
    """Return slime's `Sample.rollout_routed_experts` from routing with `all_layers`.

    Raises ConfigError for unknown rows, which slime cannot express.
    """
    _require_known(routing_PLK, "slime")
    return routing_PLK.numpy().astype(np.int32)


def from_slime(rollout_routed_experts: np.ndarray) -> torch.Tensor:
    """Return `request.routing_indices` from slime's form. Apply `moe_layers_only` to the result."""
    return duplicates_unknown(torch.from_numpy(rollout_routed_experts.astype(np.int16)))


# ---- prime-rl: bytes, shape and dtype


def to_prime_rl(routing_PLK: torch.Tensor) -> dict[str, Any]:
    """Return prime-rl's {"data": bytes, "shape": ..., "dtype": "uint8" or "uint16"}.

    Raises ConfigError for unknown rows.
    """
    _require_known(routing_PLK, "prime-rl")
    is_small = not routing_PLK.numel() or int(routing_PLK.max()) < 256
    array = routing_PLK.numpy().astype(np.uint8 if is_small else np.uint16)
    return {"data": array.tobytes(), "shape": list(array.shape), "dtype": array.dtype.name}


def from_prime_rl(routed_experts: Mapping[str, Any]) -> torch.Tensor:
    """Return `request.routing_indices` from prime-rl's form. Raises ConfigError for other forms."""
    dtype = str(routed_experts["dtype"])
    _require(dtype in _BYTES_DTYPES, f"dtype={dtype!r} must be one of {_BYTES_DTYPES}")
    return _of_bytes(routed_experts["data"], dtype, routed_experts["shape"])


# ---- NeMo-RL: [tokens - 1, layers, K] of the smallest signed type, -1 where a row is unknown


def to_nemo_rl(routing_PLK: torch.Tensor) -> torch.Tensor:
    """Return NeMo-RL's `routed_experts`: int8 for ids up to 127, else int16, -1 where unknown."""
    is_small = not routing_PLK.numel() or int(routing_PLK.max()) < 128
    return routing_PLK.to(torch.int8 if is_small else torch.int16)


def from_nemo_rl(routed_experts: torch.Tensor) -> torch.Tensor:
    """Return `request.routing_indices` from NeMo-RL's int8, int16 or int32."""
    return duplicates_unknown(routed_experts.to(torch.int16))


# ---- SGLang: `meta_info["routed_experts"]`, base64 of int32 [tokens - 1, all layers, K]


def to_sglang(routing_PLK: torch.Tensor) -> str:
    """Return SGLang's `meta_info["routed_experts"]` from routing with `all_layers`.

    Raises ConfigError for unknown rows.
    """
    _require_known(routing_PLK, "SGLang")
    return base64.b64encode(routing_PLK.numpy().astype(np.int32).tobytes()).decode("ascii")


def from_sglang(routed_experts: str, num_layers: int, top_k: int) -> torch.Tensor:
    """Return `request.routing_indices` from SGLang's form. Apply `moe_layers_only` to the result.

    Raises ConfigError for another form.
    """
    try:
        data = base64.b64decode(routed_experts, validate=True)
    except binascii.Error as fault:
        raise ConfigError(f"routed_experts of SGLang is not base64: {fault}") from fault
    return _of_bytes(data, "int32", (-1, num_layers, top_k))


# ---- checks


def _of_bytes(data: bytes, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    array = np.frombuffer(data, np.dtype(dtype))
    try:
        array = array.reshape(tuple(shape))
    except ValueError as fault:
        raise ConfigError(
            f"{len(array)} expert ids of {dtype} do not make the shape {list(shape)}"
        ) from fault
    return duplicates_unknown(torch.from_numpy(array.astype(np.int16)))


def _is_row(routing: torch.Tensor) -> torch.Tensor:
    return (routing >= 0).all(dim=-1, keepdim=True)


def _require_known(routing_PLK: torch.Tensor, system: str) -> None:
    num_unknown = int((~is_known(routing_PLK)).sum())
    _require(
        not num_unknown,
        f"{num_unknown} of {len(routing_PLK)} rows are not known, which {system} has no form for; "
        "leave the sample out, or fill them by without_unknown",
    )


def _require(is_met: bool, message: str) -> None:
    if not is_met:
        raise ConfigError(message)
