"""Which product serves which number of rows: by a simple rule, or by measured seconds.

Pure functions: equal seconds give equal choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout.backends.products.candidates import BUCKETS, PLAIN, Product

Rounds = Sequence[Sequence[float]]  # by bucket: the seconds of each round
Seconds = Mapping[str, Rounds]  # by name; products that cannot be used are left out

# By which a product, or a packed copy, must beat the default to replace it: any other product than
# the default one keeps a second copy of the weight.
_MIN_MARGIN = 0.03
_MARGIN_OF_ONE_ROUND = 0.10
_COST_OF_NO_DEFAULT = 1.25  # relative to the default product, where nothing was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The name of a product for each bucket, and its microseconds: None if it was not measured."""

    products: tuple[str, ...]
    microseconds: tuple[float | None, ...] = (None,) * len(BUCKETS)


def default_product(num_rows: int, candidates: Sequence[Product]) -> Product:
    """Return the product by rule: native, else oneDNN for at most 128 rows, else plain."""
    kinds = ["native"] + ["onednn"] * (num_rows <= 128)
    for kind in kinds:
        for product in candidates:
            if product.kind == kind:
                return product
    return PLAIN


def choose_by_rule(candidates: Sequence[Product]) -> Choice:
    """Choose the default product of each bucket."""
    return Choice(products=tuple(default_product(rows, candidates).name for rows in BUCKETS))


def choosable(candidates: Sequence[Product]) -> list[Product]:
    """Return the products that `choose` may take: those whose packed copy unpacks, or need none.

    With other packed copies an update would keep two more copies of the weights: the packed ones
    of the new weights, and a plain backup of the old ones.
    """
    return [product for product in candidates if product.unpacks or not product.packs]


def choose(seconds: Seconds, candidates: Sequence[Product]) -> Choice:
    """Choose the fastest product of each bucket, of those that share one packed copy or need none.

    The packed copy, or none, is the one with the smallest sum of the buckets' times, each relative
    to the fastest product of its bucket. A copy other than the default product's must be better by
    a margin. Within a bucket a product must beat the default by more than the noise.
    """
    candidates = [product for product in choosable(candidates) if product.name in seconds]
    defaults = [default_product(num_rows, candidates) for num_rows in BUCKETS]
    options = []
    for packing in (None, *(product for product in candidates if product.packs)):
        allowed = [product for product in candidates if not product.packs or product is packing]
        picks = [_pick(bucket, seconds, allowed).name for bucket in range(len(BUCKETS))]
        is_default = packing is next((p for p in defaults if p.packs), None)
        cost = _relative_cost(picks, seconds, candidates)
        options.append((cost * (1 - _MIN_MARGIN * is_default), picks))
    _, picks = min(options, key=lambda option: option[0])
    times = [min(seconds[name][bucket], default=None) for bucket, name in enumerate(picks)]
    return Choice(
        products=tuple(picks),
        microseconds=tuple(None if time is None else round(1e6 * time, 1) for time in times),
    )


def is_reliable(choice: Choice, seconds: Seconds) -> bool:
    """Whether each bucket's product was timed twice at least."""
    return all(len(seconds[name][bucket]) > 1 for bucket, name in enumerate(choice.products))


def fastest_of(bucket: int, seconds: Seconds) -> list[str]:
    """Names of the products timed in this bucket, the fastest first."""
    timed = [name for name in seconds if seconds[name][bucket]]
    return sorted(timed, key=lambda name: min(seconds[name][bucket]))


def _pick(bucket: int, seconds: Seconds, allowed: Sequence[Product]) -> Product:
    default = default_product(BUCKETS[bucket], allowed)
    of_default = seconds[default.name][bucket]
    if not of_default:
        return default
    timed = [product for product in allowed if seconds[product.name][bucket]]
    challenger = min(timed, key=lambda product: min(seconds[product.name][bucket]))
    of_challenger = seconds[challenger.name][bucket]
    margin = max(_noise(of_default), _noise(of_challenger))
    return challenger if min(of_challenger) * (1 + margin) < min(of_default) else default


def _noise(rounds: Sequence[float]) -> float:
    """How far apart the two fastest rounds are: in a quiet moment they repeat each other."""
    if len(rounds) < 2:
        return _MARGIN_OF_ONE_ROUND
    first, second = sorted(rounds)[:2]
    return max(_MIN_MARGIN, second / first - 1)


def _relative_cost(picks: Sequence[str], seconds: Seconds, candidates: Sequence[Product]) -> float:
    """The sum over the buckets; where nothing was measured the default is taken for the fastest."""
    cost = 0.0
    for bucket, name in enumerate(picks):
        if seconds[name][bucket]:
            fastest = fastest_of(bucket, seconds)[0]
            cost += min(seconds[name][bucket]) / min(seconds[fastest][bucket])
        else:
            is_default = name == default_product(BUCKETS[bucket], candidates).name
            cost += 1.0 if is_default else _COST_OF_NO_DEFAULT
    return cost
