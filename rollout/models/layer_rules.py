"""Rules that say which layers have a sliding window, a RoPE, or experts.

A window rule returns each layer's window or None, or () if no layer has a window. A window is the
number of tokens that a token sees, itself included. A rope rule returns each layer's RopeSpec or
None, or () if all layers have the same rope. An expert rule returns the indices of the layers with
experts. `config` is always the result of `config_keys.read_keys`. Used by `rollout.models.family`,
by the families in `rollout.models.families`, and by ModelSpec, which calls the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rollout.errors import ModelError
from rollout.layers.rope import RopeSpec
from rollout.models.rope_config import FULL, SLIDING, rope_from_hf

Config: TypeAlias = Mapping[str, Any]
Windows: TypeAlias = tuple[int | None, ...]
Ropes: TypeAlias = tuple[RopeSpec | None, ...]


# ---- windows


def no_windows(config: Config, num_layers: int) -> Windows:
    """Return (): every layer attends to all tokens before."""
    return ()


def same_window(config: Config, num_layers: int) -> Windows:
    """Return `sliding_window` for every layer; () if the config has none."""
    window = config.get("sliding_window")
    return () if window is None else (_positive(window),) * num_layers


def same_window_if_used(config: Config, num_layers: int) -> Windows:
    """Return the result of `same_window` if `use_sliding_window` is set, else ()."""
    return same_window(config, num_layers) if config["use_sliding_window"] else ()


def windows_by_type(full_every: int | None = None) -> Callable[[Config, int], Windows]:
    """Return a rule that gives `sliding_window` to the "sliding_attention" layers of `layer_types`.
    If the config has no `layer_types`, every `full_every`-th layer attends to all tokens and the
    other layers slide. If `full_every` is None, the rule then does what `same_window` does."""

    def windows(config: Config, num_layers: int) -> Windows:
        types = config.get("layer_types")
        if types is None and full_every is None:
            return same_window(config, num_layers)
        if types is None:
            types = _pattern(full_every or 1, num_layers)
        return windows_of_types(types, config, num_layers)

    return windows


def windows_by_pattern(config: Config, num_layers: int) -> Windows:
    """Return windows by `layer_types`. Without that key every `sliding_window_pattern`-th layer
    attends to all tokens, and the other layers slide."""
    types = config.get("layer_types")
    if types is None:
        types = _pattern(config["sliding_window_pattern"], num_layers)
    return windows_of_types(types, config, num_layers)


def windows_if_used(config: Config, num_layers: int) -> Windows:
    """Return windows by `layer_types`. Without that key the layers from `max_window_layers` on
    slide, if `use_sliding_window` is set and the config has a `sliding_window`."""
    types = config.get("layer_types")
    if types is None:
        has_window = config["use_sliding_window"] and config["sliding_window"] is not None
        first = config["max_window_layers"] if has_window else num_layers
        types = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return windows_of_types(types, config, num_layers)


def windows_without_rope(config: Config, num_layers: int) -> Windows:
    """Return windows by `layer_types`. Without that key the layers without rope slide, if
    `use_sliding_window` is set and the config has a `sliding_window`."""
    types = config.get("layer_types")
    if types is None:
        has_window = config["use_sliding_window"] and config.get("sliding_window") is not None
        types = [
            FULL if has_rope or not has_window else SLIDING
            for has_rope in _rope_flags(config, num_layers)
        ]
    return windows_of_types(types, config, num_layers)


def windows_of_types(types: Sequence[str], config: Config, num_layers: int) -> Windows:
    """Return `sliding_window` for each layer of type "sliding_attention", None for other layers.

    Returns () if no layer slides. Raises ModelError if `types` does not have `num_layers` entries,
    for a type other than "sliding_attention" and "full_attention", and if layers slide without a
    window in use.
    """
    if len(types) != num_layers:
        raise ModelError(f"layer_types lists {len(types)} layers, num_hidden_layers={num_layers}")
    if unknown := sorted(set(types) - {FULL, SLIDING}):
        raise ModelError(f"layer_types has {unknown[0]!r}; supported: {FULL!r}, {SLIDING!r}")
    if SLIDING not in types:
        return ()
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", True):
        raise ModelError(
            f"layer_types has {SLIDING!r}, but sliding_window={window!r} and use_sliding_window="
            f"{config.get('use_sliding_window')!r}: set both, or make these layers {FULL!r}"
        )
    window = _positive(window)
    return tuple(window if kind == SLIDING else None for kind in types)


def _pattern(full_every: int, num_layers: int) -> list[str]:
    return [SLIDING if (layer + 1) % full_every else FULL for layer in range(num_layers)]


def _positive(window: int) -> int:
    if window < 1:  # a token would not even see itself
        raise ModelError(
            f"sliding_window={window!r} in the config must be a positive integer where layers slide"
        )
    return window


# ---- ropes


def same_rope(config: Config, windows: Windows) -> Ropes:
    """Return (): all layers have the same rope."""
    return ()


def ropes_by_type(config: Config, windows: Windows) -> Ropes:
    """Return the rope of "sliding_attention" for layers with a window, and the rope of
    "full_attention" for other layers."""
    full, sliding = rope_from_hf(config, FULL), rope_from_hf(config, SLIDING)
    return tuple(full if window is None else sliding for window in windows)


def rope_with_window(config: Config, windows: Windows) -> Ropes:
    """Return the config's rope for layers with a window, None for other layers."""
    rope = rope_from_hf(config)
    return tuple(None if window is None else rope for window in windows)


def rope_by_flag(config: Config, windows: Windows) -> Ropes:
    """Return None for layers with 0 in `no_rope_layers`, the config's rope for other layers.
    Without that key every `no_rope_layer_interval`-th layer has no rope. Returns () if all layers
    have a rope."""
    rope = rope_from_hf(config)
    flags = _rope_flags(config, config["num_hidden_layers"])
    return () if all(flags) else tuple(rope if has_rope else None for has_rope in flags)


def _rope_flags(config: Config, num_layers: int) -> list[bool]:
    given = config.get("no_rope_layers")
    if given is None:
        interval = config["no_rope_layer_interval"]
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(given) != num_layers:
        raise ModelError(f"no_rope_layers lists {len(given)} layers, not {num_layers}")
    return [bool(flag) for flag in given]


# ---- experts


def no_experts(config: Config, num_layers: int) -> tuple[int, ...]:
    """Return (): every layer has an MLP."""
    return ()


def experts_everywhere(config: Config, num_layers: int) -> tuple[int, ...]:
    """Return the indices of all layers."""
    return tuple(range(num_layers))


def experts_by_step(config: Config, num_layers: int) -> tuple[int, ...]:
    """Return every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    step, dense = config["decoder_sparse_step"], config.get("mlp_only_layers") or ()
    return tuple(n for n in range(num_layers) if (n + 1) % step == 0 and n not in dense)


def experts_after_first(config: Config, num_layers: int) -> tuple[int, ...]:
    """Return the layers from `first_k_dense_replace` on."""
    return tuple(range(config["first_k_dense_replace"], num_layers))


def experts_by_type(config: Config, num_layers: int) -> tuple[int, ...]:
    """Return the layers of type "sparse" in `mlp_layer_types`. Without that key, return all layers
    but the first. Raises ModelError unless the key has "dense" or "sparse" for each layer."""
    types = config.get("mlp_layer_types")
    if types is None:
        types = ["dense"] + ["sparse"] * (num_layers - 1)
    if len(types) != num_layers or not set(types) <= {"dense", "sparse"}:
        raise ModelError(
            f"mlp_layer_types={types!r} must name num_hidden_layers={num_layers} layers, each "
            "'dense' or 'sparse'"
        )
    return tuple(layer for layer, kind in enumerate(types) if kind == "sparse")
