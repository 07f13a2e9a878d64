"""ProductSelection: the products that serve an engine's weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from torch import Tensor

from rollout.backends.products.cache import ChoiceCache
from rollout.backends.products.candidates import BUCKETS, PLAIN, Product
from rollout.backends.products.choice import (
    Choice,
    Rounds,
    choosable,
    choose,
    choose_by_rule,
    is_reliable,
)
from rollout.backends.products.timing import Stopwatch, measure
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
        cache: ChoiceCache,
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
        self._measured = cache.load(self._candidates) if switch == _MEASURES else {}
        self._in_use: dict[str, Choice] = {}

    def products_for(self, weight_NK: Tensor) -> list[Product]:
        """Return the product of each bucket of BUCKETS for this weight, [N, K]."""
        return [self._candidates[name] for name in self._choice(weight_NK).products]

    def measure(self, weights: Iterable[Tensor]) -> None:
        """Measure products for shapes without a choice, and save the choices. Logs one line.

        Takes at most two seconds, of CPU time if torch has one thread.
        """
        weights = list(weights)
        used = {_key(weight_NK): weight_NK for weight_NK in weights}
        unknown: dict[str, Tensor] = {}
        start = time.monotonic()
        if self._switch == _MEASURES:
            unknown = {key: weight for key, weight in used.items() if key not in self._measured}
        if unknown:
            self._measure(unknown, weights)
        self._in_use |= {key: self._choice(weight_NK) for key, weight_NK in used.items()}
        logger.info(
            "products: %s=%s, %d of %d shapes measured in %.1f s: %s",
            *(SWITCH, self._switch, len(unknown), len(used), time.monotonic() - start),
            "; ".join(f"{key}: {_summary(self._in_use[key])}" for key in used),
        )

    def choose_for(self, key: str, measure: Callable[[Stopwatch], tuple[Rounds, Rounds]]) -> Choice:
        """Return the choice between the plain and the native way of something else than a weight:
        by the seconds of these that `measure` gives, now or, earlier, on this machine.

        It never changes for a key.
        """
        if key not in self._in_use:
            natives = [name for name, p in self._candidates.items() if p.kind == "native"]
            is_native = self._switch == _BY_RULE or self._switch.startswith("native")
            if natives and self._switch == _MEASURES:
                self._in_use[key] = self._choose_measured(key, natives[0], measure)
            else:
                name = natives[0] if natives and is_native else PLAIN.name
                self._in_use[key] = Choice(products=(name,) * len(BUCKETS))
        return self._in_use[key]

    def choices(self) -> dict[str, Choice]:
        """The choices in use, by key."""
        return dict(self._in_use)

    def take_choices(self, choices: Mapping[str, Choice]) -> None:
        """Choose the same as another process of this machine, whatever was measured before."""
        self._measured |= choices

    def explain(self) -> str:
        """Return a table of the choices in use or saved: one line for each shape and bucket."""
        lines = [f"{'weight':<28}{'rows':>5}  {'product':<18}{'microseconds':>12}"]
        for key, choice in (self._measured | self._in_use).items():
            rows = zip(BUCKETS, choice.products, choice.microseconds, strict=True)
            for bucket, name, microseconds in rows:
                shown = "not measured" if microseconds is None else f"{microseconds:.0f}"
                lines.append(f"{key:<28}{_rows(bucket):>5}  {name:<18}{shown:>12}")
        return "\n".join(lines)

    def _choice(self, weight_NK: Tensor) -> Choice:
        suited = [product for product in self._candidates.values() if product.suits(weight_NK)]
        if self._switch in (_MEASURES, _BY_RULE):
            choice = self._measured.get(_key(weight_NK))
            is_usable = choice and {*choice.products} <= {product.name for product in suited}
            return choice if choice and is_usable else choose_by_rule(suited)
        forced = (p.name for p in suited if self._switch in (p.name, p.kind))
        return Choice(products=(next(forced, PLAIN.name),) * len(BUCKETS))

    def _measure(self, unknown: dict[str, Tensor], model_weights: Sequence[Tensor]) -> None:
        candidates = choosable([*self._candidates.values()])
        seconds = measure(unknown, candidates, self._start_stopwatch(), model_weights)
        found = {key: choose(seconds[key], candidates) for key in unknown}
        # What a slow or busy machine could not finish is measured again by the next engine.
        kept = {key: found[key] for key in found if is_reliable(found[key], seconds[key])}
        # Another engine may have saved a choice while this one measured; both use that one.
        self._measured |= found | self._cache.save(kept, self._candidates)

    def _choose_measured(
        self, key: str, native: str, measure: Callable[[Stopwatch], tuple[Rounds, Rounds]]
    ) -> Choice:
        if key not in self._measured:
            names = PLAIN.name, native
            seconds = dict(zip(names, measure(self._start_stopwatch()), strict=True))
            found = choose(seconds, [self._candidates[name] for name in names])
            kept = {key: found} if is_reliable(found, seconds) else {}
            self._measured |= {key: found} | self._cache.save(kept, self._candidates)
            logger.info("products: measured %s: %s", key, _summary(self._measured[key]))
        return self._measured[key]


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
