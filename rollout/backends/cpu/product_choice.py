"""Which product serves which number of rows: by a simple rule, or by measured times.

Pure functions: equal times give equal choices. All times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollout.backends.cpu.products import BUCKETS, PLAIN, Product

Rounds = Sequence[float]  # the fastest rounds in a bucket, the fastest first; empty: none

FORWARD_PASS = "forward pass"  # among the choices by key: the product that runs it in one call
ONE_BY_ONE = "one by one"  # there: no product does, the layers run one by one

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What a product was measured to take with a weight.

    `work` is by bucket: the two fastest rounds, fewer where there was no time for them. `call` is
    what a call from Python takes besides.
    """

    call: float
    work: tuple[tuple[float, ...], ...]

    def called(self) -> list[Rounds]:
        """Rounds by bucket, with the call."""
        return [[self.call + work for work in rounds] for rounds in self.work]


Measured = Mapping[str, Times]  # by the product's name; those that cannot be used are left out


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedPass:
    """A forward pass that runs in one call where one product serves all its weights.

    `uses` counts how often it multiplies with weights of each key. `num_other_calls` are made
    besides products where the layers run one by one.
    """

    uses: Mapping[str, int]
    num_other_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """A name and its rounds for each bucket; `is_default` if what is packed is so by default."""

    names: Sequence[str]
    rounds: Sequence[Rounds]
    is_default: bool = False

    def choice(self) -> Choice:
        times = [round(rounds[0], 1) if rounds else None for rounds in self.rounds]
        return Choice(products=tuple(self.names), microseconds=tuple(times))


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


def choose(
    measured: Measured, candidates: Sequence[Product], of_pass: Choice | None = None
) -> Choice:
    """Choose the fastest product of each bucket, of those that share one packed copy or need none.

    The packed copy, or none, is the one with the smallest sum of the buckets' times, each relative
    to the fastest of its bucket. A copy other than the default product's must be better by a
    margin. Within a bucket a product must beat the default by more than the noise.

    `of_pass` is what `choose_pass` has chosen for a pass that uses the weight: its products serve
    where they run the pass, and their packed copy is the weight's.
    """
    candidates = [product for product in choosable(candidates) if product.name in measured]
    layout = None if of_pass is None else _layout_of(of_pass, candidates)
    if of_pass is not None and layout is not None:
        return _bound(measured, layout, of_pass, candidates).choice()
    defaults = [default_product(num_rows, candidates) for num_rows in BUCKETS]
    packed_by_default = next((product.layout for product in defaults if product.packs), None)
    options = [
        _fastest(measured, layout, candidates, packed_by_default)
        for layout in (None, *dict.fromkeys(p.layout for p in candidates if p.packs))
    ]
    return _cheapest(options, [product.name for product in defaults]).choice()


def choose_pass(
    fused: FusedPass, measured: Mapping[str, Measured], candidates: Sequence[Product]
) -> Choice:
    """Choose the product that runs a forward pass in one call, or ONE_BY_ONE, for each bucket.

    A pass in one call takes the work of its products; one by one they are called from Python, each
    weight with its fastest product, and the layers make their other calls, which are taken to be
    as long as those of products. Options and margins are as those of `choose`: products that fuse
    and share a layout, of which all weights have a packed copy, are better than those of another,
    or than each weight's own choice, by the sum of the pass's times over the buckets.
    """
    fusing = [
        product
        for product in choosable(candidates)
        if product.is_fused and all(product.name in measured[key] for key in fused.uses)
    ]
    if not fusing or not fused.uses:
        return Choice(products=(ONE_BY_ONE,) * len(BUCKETS))
    by_layout: dict[str | None, list[Product]] = {}
    for product in fusing:
        by_layout.setdefault(product.layout, []).append(product)
    options = [
        _pass_with(sharing, fused, measured, candidates, is_default=fusing[0] in sharing)
        for sharing in by_layout.values()
    ]
    alone = {key: choose(measured[key], candidates).products for key in fused.uses}
    rounds = _one_by_one(alone, fusing[0], fused, measured)
    options.append(_Option(names=[ONE_BY_ONE] * len(BUCKETS), rounds=rounds))
    return _cheapest(options, [fusing[0].name] * len(BUCKETS)).choice()


def is_reliable(measured: Measured) -> bool:
    """Whether each bucket has a second round, which times the default and the fastest products."""
    return all(
        any(len(times.work[bucket]) > 1 for times in measured.values())
        for bucket in range(len(BUCKETS))
    )


# ---- one weight


def _fastest(
    measured: Measured,
    layout: str | None,
    candidates: Sequence[Product],
    packed_by_default: str | None,
) -> _Option:
    """The fastest products of those that need a packed copy with this layout, or none."""
    allowed = [product for product in candidates if product.layout in (None, layout)]
    called = {product.name: measured[product.name].called() for product in allowed}
    names = []
    for bucket, num_rows in enumerate(BUCKETS):
        default = default_product(num_rows, allowed).name
        timed = [name for name in called if called[name][bucket]]
        challenger = min(timed, key=lambda name: called[name][bucket][0], default=default)
        is_beaten = _beats(called[challenger][bucket], called[default][bucket])
        names.append(challenger if is_beaten else default)
    rounds = [called[name][bucket] for bucket, name in enumerate(names)]
    needed = layout if any(p.packs and p.name in names for p in allowed) else None
    return _Option(names=names, rounds=rounds, is_default=needed == packed_by_default)


def _bound(
    measured: Measured, layout: str, of_pass: Choice, candidates: Sequence[Product]
) -> _Option:
    """The products of the pass where they run it, elsewhere the fastest that their copy allows."""
    apart = _fastest(measured, layout, candidates, layout)
    names, rounds = [*apart.names], [*apart.rounds]
    for bucket, name in enumerate(of_pass.products):
        if name != ONE_BY_ONE:
            names[bucket], rounds[bucket] = name, measured[name].work[bucket]
    return _Option(names=names, rounds=rounds)


def _layout_of(of_pass: Choice, candidates: Iterable[Product]) -> str | None:
    """What the products of a pass share; None if the layers always run one by one."""
    return next((p.layout for p in candidates if p.name in of_pass.products), None)


# ---- a whole pass


def _pass_with(
    fusing: Sequence[Product],
    fused: FusedPass,
    measured: Mapping[str, Measured],
    candidates: Sequence[Product],
    *,
    is_default: bool,
) -> _Option:
    """The pass in one call by the fastest of `fusing`, which share a packed copy, or its layers one
    by one where that is faster with the same copies.
    """
    apart, layout = {}, fusing[0].layout
    for key in fused.uses:
        suited = [p for p in choosable(candidates) if p.name in measured[key]]
        apart[key] = _fastest(measured[key], layout, suited, layout).names
    names, rounds = [], []
    for bucket, one_by_one in enumerate(_one_by_one(apart, fusing[0], fused, measured)):
        name, in_one_call = _fastest_in_one_call(fusing, fused, measured, bucket)
        is_beaten = _beats(one_by_one, in_one_call)
        names.append(ONE_BY_ONE if is_beaten else name)
        rounds.append(one_by_one if is_beaten else in_one_call)
    is_used = any(name != ONE_BY_ONE for name in names)
    return _Option(names=names, rounds=rounds, is_default=is_default and is_used)


def _fastest_in_one_call(
    fusing: Sequence[Product], fused: FusedPass, measured: Mapping[str, Measured], bucket: int
) -> tuple[str, Rounds]:
    """The name and rounds of the first product, or of one that beats it by more than the noise."""
    rounds = {
        product.name: _sum(
            (count, measured[key][product.name].work[bucket]) for key, count in fused.uses.items()
        )
        for product in fusing
    }
    default = fusing[0].name
    timed = [name for name in rounds if rounds[name]]
    challenger = min(timed, key=lambda name: rounds[name][0], default=default)
    name = challenger if _beats(rounds[challenger], rounds[default]) else default
    return name, rounds[name]


def _one_by_one(
    chosen: Mapping[str, Sequence[str]],
    product: Product,
    fused: FusedPass,
    measured: Mapping[str, Measured],
) -> list[Rounds]:
    """Rounds by bucket of the products of these names, by key, and of all other calls.

    `product` is a compiled one: its call is as long as another operation's.
    """
    call = min(measured[key][product.name].call for key in fused.uses)
    return [
        _sum(
            (
                (count, measured[key][chosen[key][bucket]].called()[bucket])
                for key, count in fused.uses.items()
            ),
            fused.num_other_calls * call,
        )
        for bucket in range(len(BUCKETS))
    ]


def _sum(parts: Iterable[tuple[int, Rounds]], rest: float = 0.0) -> Rounds:
    """The fastest rounds of all parts together, each so many times; as many as all parts have."""
    parts = list(parts)
    num_rounds = min(len(rounds) for _, rounds in parts)
    return [
        rest + sum(count * rounds[index] for count, rounds in parts) for index in range(num_rounds)
    ]


# ---- comparisons


def _beats(challenger: Rounds, default: Rounds) -> bool:
    """Whether it is faster by more than the noise. What was not timed does not beat the default,
    and is not beaten.
    """
    if not challenger or not default:
        return False
    return challenger[0] * (1 + max(_noise(default), _noise(challenger))) < default[0]


def _noise(rounds: Rounds) -> float:
    """How far apart the two fastest rounds are: in a quiet moment they repeat each other."""
    if len(rounds) < 2:
        return _MARGIN_OF_ONE_ROUND
    return max(_MIN_MARGIN, rounds[1] / rounds[0] - 1)


def _cheapest(options: Sequence[_Option], defaults: Sequence[str]) -> _Option:
    """The option with the smallest sum over the buckets of its time relative to the fastest one's.

    Where it was not measured the default is taken for the fastest.
    """

    def cost(option: _Option) -> float:
        total = 0.0
        for bucket, name in enumerate(option.names):
            if option.rounds[bucket]:
                timed = [other.rounds[bucket][0] for other in options if other.rounds[bucket]]
                total += option.rounds[bucket][0] / min(timed)
            else:
                total += 1.0 if name == defaults[bucket] else _COST_OF_NO_DEFAULT
        return total * (1 - _MIN_MARGIN * option.is_default)

    return min(options, key=cost)
