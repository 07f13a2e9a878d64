"""ProductSelection: the products that serve an engine's weights."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from torch import Tensor

from rollout.backends.cpu.product_cache import TimesCache
from rollout.backends.cpu.product_choice import (
    FORWARD_PASS,
    ONE_BY_ONE,
    Choice,
    FusedPass,
    Measured,
    choosable,
    choose,
    choose_by_rule,
    choose_pass,
    is_reliable,
)
from rollout.backends.cpu.product_timing import Seconds, Stopwatch, measure, times_of
from rollout.backends.cpu.products import BUCKETS, PLAIN, Product
from rollout.errors import ConfigError

logger = logging.getLogger(__name__)

SWITCH = "ROLLOUT_TUNE"  # "0": choose by rule; a product's name or kind: use it where it can serve
_MEASURES, _BY_RULE = "1", "0"


class ProductSelection:
    """Chooses products for weights: by times measured on this machine, now or earlier, or by rule.

    `switch` is the value of ROLLOUT_TUNE: "1" measures, "0" goes by rule, and the name or kind of a
    product forces that product. Raises ConfigError if this machine has no such product.
    """

    def __init__(
        self,
        candidates: Sequence[Product],
        switch: str,
        cache: TimesCache,
        start_stopwatch: Callable[[], Stopwatch] = Stopwatch,
    ) -> None:
        self._candidates = {product.name: product for product in candidates}
        kinds = [product.kind for product in candidates]
        legal = dict.fromkeys((_BY_RULE, _MEASURES, *kinds, *self._candidates))
        if switch not in legal:
            raise ConfigError(
                f"{SWITCH}={switch!r} is no product of this machine; use one of {[*legal]}"
            )
        self._switch, self._cache, self._start_stopwatch = switch, cache, start_stopwatch
        self._times = cache.load(self._candidates) if switch == _MEASURES else {}
        self._given: dict[str, Choice] = {}  # by another process
        self._in_use: dict[str, Choice] = {}

    def choose(
        self,
        weights: Iterable[Tensor],
        fused_weights: Sequence[Tensor] = (),
        num_other_calls: int = 0,
    ) -> None:
        """Choose products for all weights of a model, for equal shapes the same. Logs one line.

        `fused_weights` are those of a pass that one product could run in one call, each as often as
        the pass uses it; its layers make `num_other_calls` besides where they run one by one.
        Shapes without times are measured, which takes at most two seconds, of CPU time if torch has
        one thread; the times are kept.
        """
        weights = list(weights)
        used = {_key(weight_NK): weight_NK for weight_NK in weights}
        unknown: dict[str, Tensor] = {}
        start = time.monotonic()
        if self._switch == _MEASURES:
            known = self._given.keys() | self._times.keys()
            unknown = {key: weight for key, weight in used.items() if key not in known}
        if unknown:
            self._measure(unknown, weights)
        fused = FusedPass(uses=Counter(map(_key, fused_weights)), num_other_calls=num_other_calls)
        of_pass = self._choice_of_pass(fused)
        for key, weight_NK in used.items():
            self._in_use[key] = self._choice(weight_NK, of_pass if key in fused.uses else None)
        logger.info(
            "products: %s=%s, %d of %d shapes measured in %.1f s: %s",
            *(SWITCH, self._switch, len(unknown), len(used), time.monotonic() - start),
            "; ".join(f"{key}: {_summary(self._in_use[key])}" for key in used),
        )

    def products_for(self, weight_NK: Tensor) -> list[Product]:
        """Return the product of each bucket of BUCKETS that was chosen for this weight, [N, K]."""
        return [self._candidates[name] for name in self._in_use[_key(weight_NK)].products]

    def fused_buckets(self) -> frozenset[int]:
        """The buckets in which passes may run in one call: all, where nothing is measured."""
        of_pass = self._in_use.get(FORWARD_PASS)
        return frozenset(
            bucket
            for bucket in range(len(BUCKETS))
            if of_pass is None or of_pass.products[bucket] != ONE_BY_ONE
        )

    def choose_for(
        self,
        key: str,
        measure: Callable[[Stopwatch], tuple[Seconds, Seconds]],
    ) -> Choice:
        """Return the choice between the plain and the native way of something else than a weight:
        by the seconds of these that `measure` gives by bucket and round, now or, earlier, on this
        machine.

        It never changes for a key.
        """
        if key not in self._in_use:
            natives = [product for product in self._candidates.values() if product.kind == "native"]
            is_native = self._switch == _BY_RULE or self._switch.startswith("native")
            if key in self._given:
                self._in_use[key] = self._given[key]
            elif natives and self._switch == _MEASURES:
                self._in_use[key] = self._choose_measured(key, natives[0], measure)
            else:
                name = natives[0].name if natives and is_native else PLAIN.name
                self._in_use[key] = Choice(products=(name,) * len(BUCKETS))
        return self._in_use[key]

    def choices(self) -> dict[str, Choice]:
        """The choices in use, by key."""
        return dict(self._in_use)

    def take_choices(self, choices: Mapping[str, Choice]) -> None:
        """Choose the same as another process of this machine, whatever was measured before."""
        self._given |= choices

    def explain(self) -> str:
        """Return a table of the choices in use: one line for each shape and bucket."""
        lines = [f"{'weight':<28}{'rows':>5}  {'product':<18}{'microseconds':>12}"]
        for key, choice in self._in_use.items():
            rows = zip(BUCKETS, choice.products, choice.microseconds, strict=True)
            for bucket, name, microseconds in rows:
                shown = "not measured" if microseconds is None else f"{microseconds:.0f}"
                lines.append(f"{key:<28}{_rows(bucket):>5}  {name:<18}{shown:>12}")
        return "\n".join(lines)

    def _choice_of_pass(self, fused: FusedPass) -> Choice | None:
        """None where nothing is measured: then the choices of weights alone decide."""
        choice = self._given.get(FORWARD_PASS)
        if choice is None and fused.uses and fused.uses.keys() <= self._times.keys():
            choice = choose_pass(fused, self._times, [*self._candidates.values()])
        if choice is not None:
            self._in_use[FORWARD_PASS] = choice
        return choice

    def _choice(self, weight_NK: Tensor, of_pass: Choice | None) -> Choice:
        suited = [product for product in self._candidates.values() if product.suits(weight_NK)]
        if self._switch not in (_MEASURES, _BY_RULE):
            forced = (p.name for p in suited if self._switch in (p.name, p.kind))
            return Choice(products=(next(forced, PLAIN.name),) * len(BUCKETS))
        key = _key(weight_NK)
        if key in self._given:
            return self._given[key]
        if key in self._times:
            return choose(self._times[key], suited, of_pass)
        return choose_by_rule(suited)

    def _measure(self, unknown: dict[str, Tensor], model_weights: Sequence[Tensor]) -> None:
        candidates = choosable([*self._candidates.values()])
        self._keep(measure(unknown, candidates, self._start_stopwatch(), model_weights))

    def _keep(self, times: Mapping[str, Measured]) -> None:
        # What a slow or busy machine could not finish is measured again by the next engine.
        reliable = {key: measured for key, measured in times.items() if is_reliable(measured)}
        # Another engine may have saved times while this one measured; both choose by those.
        self._times |= {**times} | self._cache.save(reliable, self._candidates)

    def _choose_measured(
        self,
        key: str,
        native: Product,
        measure: Callable[[Stopwatch], tuple[Seconds, Seconds]],
    ) -> Choice:
        if key not in self._times:
            rounds = zip((PLAIN.name, native.name), measure(self._start_stopwatch()), strict=True)
            self._keep({key: {name: times_of(seconds) for name, seconds in rounds}})
            choice = choose(self._times[key], [PLAIN, native])
            logger.info("products: measured %s: %s", key, _summary(choice))
        return choose(self._times[key], [PLAIN, native])


def _key(weight_NK: Tensor) -> str:
    num_outputs, num_inputs = weight_NK.shape
    return f"{num_outputs}x{num_inputs} {str(weight_NK.dtype).removeprefix('torch.')}"


def _rows(bucket: int) -> str:
    return f"{bucket}+" if bucket == BUCKETS[-1] else str(bucket)


def _summary(choice: Choice) -> str:
    """Such as "native-256 from 1, plain from 129 rows"."""
    parts = []
    num_rows = 1
    for name, buckets in groupby(zip(choice.products, BUCKETS, strict=True), lambda pair: pair[0]):
        parts.append(f"{name} from {num_rows}")
        num_rows = [*buckets][-1][1] + 1
    return ", ".join(parts) + " rows"
