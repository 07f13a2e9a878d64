"""The plan of a run: which shapes and sizes, and the parts that measure them, most wanted first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu_attention import TurnSizes, measure_turn
from benchmarks.gpu_device import MeasuredDevice
from benchmarks.gpu_engines import EngineHolder, pool_config, random_model
from benchmarks.gpu_floors import Floors, FloorSizes, measure_floors
from benchmarks.gpu_memory import CycleSizes, measure_cycles, measure_update
from benchmarks.gpu_parts import Deadline, Part
from benchmarks.gpu_shapes import (
    BLOCK_TOKENS,
    NEAR_NOTHING,
    QWEN3,
    PoolShape,
    context_that_fits,
)
from benchmarks.gpu_steps import (
    DecodeSizes,
    PrefillSizes,
    measure_decode,
    measure_host,
    measure_prefill,
)
from benchmarks.peers_workloads import Size, contests
from rollout import DynamicInferenceEngine
from rollout.models.spec import ModelSpec

KV, WEIGHTS = "kv_cache", "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All sizes of a run. `pool` is of the engines that decode; `host_pool` of the one that leaves
    the device idle; `reserve_bytes` are left to whatever is neither weights nor KV. `needs_s` is
    what a part of a kind may take, an engine's building included.
    """

    floors: FloorSizes
    shapes: Mapping[str, ModelSpec]
    batches: tuple[int, ...]
    pool: PoolShape
    num_warm_up: int
    num_steps: int
    prefill: PrefillSizes
    turns: tuple[TurnSizes, ...]
    update_shape: str
    num_updates: int
    suspend_shape: str
    suspend_memory_kind: str
    suspend_pool: PoolShape
    num_cycles: int
    host_spec: ModelSpec
    host_batches: tuple[int, ...]
    host_pool: PoolShape
    num_host_steps: int
    contest_shape: str
    has_small_workloads: bool
    num_contest_runs: int
    num_peer_blocks: int | None
    reserve_bytes: int
    needs_s: Mapping[str, float]


FULL = Plan(
    floors=FloorSizes(device_bytes=4 << 30, pinned_bytes=1 << 30, matrix_size=8192, num_calls=20),
    shapes={name: QWEN3[name] for name in ("8B", "4B", "0.6B")},
    batches=(256, 1, 64),
    pool=PoolShape(num_rows=256, context_len=1024),
    num_warm_up=8,
    num_steps=32,
    prefill=PrefillSizes(num_prompts=32, prompt_len=1000),
    turns=tuple(
        TurnSizes(batch=batch, num_cached=32_768, num_new=128, num_calls=50) for batch in (1, 4)
    ),
    update_shape="4B",
    num_updates=3,
    suspend_shape="4B",
    suspend_memory_kind="vmm",
    suspend_pool=PoolShape(num_rows=64, context_len=1024),
    num_cycles=3,
    host_spec=NEAR_NOTHING,
    host_batches=(1, 64, 256),
    host_pool=PoolShape(num_rows=256, context_len=256),
    num_host_steps=128,
    contest_shape="0.6B",
    has_small_workloads=False,
    num_contest_runs=2,
    num_peer_blocks=None,
    reserve_bytes=8 << 30,
    needs_s={
        "floors": 5.0,
        "decode": 20.0,
        "prefill": 20.0,
        "turn": 10.0,
        "suspend": 15.0,
        "update": 15.0,
        "generation": 30.0,
        "host": 15.0,
    },
)


class Measurements:
    """The parts of a plan on one device. Parts of a shape share an engine, and lie together."""

    def __init__(self, plan: Plan, device: MeasuredDevice, deadline: Deadline) -> None:
        self._plan, self._device, self._deadline = plan, device, deadline
        self._floors: Floors | None = None
        self.engines = EngineHolder(device)

    def parts(self) -> list[Part]:
        """In the order of their weight, but for what is cheap once an engine is there."""
        plan = self._plan
        parts = [self._part("floors", "floors", self._measure_floors)]
        parts += [self._turn(next(iter(plan.shapes)), sizes) for sizes in plan.turns]
        for shape in plan.shapes:
            parts += [self._decode(shape, batch) for batch in plan.batches]
            parts.append(self._prefill(shape))
            if shape == plan.update_shape:
                parts.append(self._update(shape))
        for mode, release in (
            ("persist", (KV,)),
            ("offload", (KV,)),
            ("recompute", (KV,)),
            ("offload", (KV, WEIGHTS)),
        ):
            parts.append(self._suspend(mode, release))
        parts.append(self._contest("W2"))
        parts += [self._host(batch) for batch in plan.host_batches]
        parts += [self._contest(name) for name in ("W1", "W3", "W4")]
        return parts

    def _part(self, name: str, kind: str, measure: Callable[[], dict[str, Any]]) -> Part:
        return Part(name=name, kind=kind, needs_s=self._plan.needs_s[kind], measure=measure)

    def _measure_floors(self) -> dict[str, Any]:
        spec = next(iter(self._plan.shapes.values()))
        self._floors = measure_floors(self._device, self._plan.floors, spec.dtype)
        return asdict(self._floors) | {"memory_bytes_per_s": self._floors.memory_bytes_per_s}

    # ---- engines

    def _engine(
        self, name: str, spec: ModelSpec, wanted: PoolShape, memory_kind: str = "device"
    ) -> DynamicInferenceEngine:
        def build() -> DynamicInferenceEngine:
            free = self._device.free_bytes()
            pool = context_that_fits(spec, wanted, free, self._plan.reserve_bytes)
            config = pool_config(spec, pool, self._device.name, memory_kind=memory_kind)
            model = random_model(spec, self._device.name)
            return DynamicInferenceEngine.from_model(model, config)

        return self.engines.get(name, build)

    def _decoder(self, shape: str) -> DynamicInferenceEngine:
        return self._engine(shape, self._plan.shapes[shape], self._plan.pool)

    # ---- parts

    def _decode(self, shape: str, batch: int) -> Part:
        plan, spec = self._plan, self._plan.shapes[shape]

        def measure() -> dict[str, Any]:
            engine = self._decoder(shape)
            sizes = DecodeSizes(
                batch=batch,
                context_len=_context_len(engine, plan.pool),
                num_warm_up=plan.num_warm_up,
                num_steps=plan.num_steps,
            )
            figures = measure_decode(self._device, engine, spec, self._floors, sizes)
            return {"shape": shape, **figures}

        return self._part(f"decode {shape}, batch {batch}", "decode", measure)

    def _prefill(self, shape: str) -> Part:
        plan, spec = self._plan, self._plan.shapes[shape]

        def measure() -> dict[str, Any]:
            engine = self._decoder(shape)
            return {
                "shape": shape,
                **measure_prefill(self._device, engine, spec, self._floors, plan.prefill),
            }

        return self._part(f"prefill {shape}", "prefill", measure)

    def _turn(self, shape: str, sizes: TurnSizes) -> Part:
        spec = self._plan.shapes[shape]

        def measure() -> dict[str, Any]:
            return {"shape": shape, **measure_turn(self._device, spec, self._floors, sizes)}

        what = f"{sizes.num_new} tokens behind {sizes.num_cached}"
        return self._part(f"attention {shape}, {what}, batch {sizes.batch}", "turn", measure)

    def _update(self, shape: str) -> Part:
        plan, spec = self._plan, self._plan.shapes[shape]

        def measure() -> dict[str, Any]:
            engine = self._decoder(shape)
            return {
                "shape": shape,
                **measure_update(self._device, engine, spec, plan.num_updates),
            }

        return self._part(f"update weights {shape}", "update", measure)

    def _suspend(self, mode: str, release: tuple[str, ...]) -> Part:
        plan, shape = self._plan, self._plan.suspend_shape
        spec, pool, kind = plan.shapes[shape], plan.suspend_pool, plan.suspend_memory_kind

        def measure() -> dict[str, Any]:
            engine = self._engine(f"{shape} on {kind}", spec, pool, kind)
            sizes = CycleSizes(
                mode=mode,
                release=release,
                num_rows=pool.num_rows,
                context_len=_context_len(engine, pool),
                num_cycles=plan.num_cycles,
            )
            figures = measure_cycles(self._device, engine, spec, self._floors, sizes)
            return {"shape": shape, "memory_kind": kind, **figures}

        what = " and ".join(release).replace("_", " ")
        return self._part(f"suspend {shape}, {mode} {what}", "suspend", measure)

    def _host(self, batch: int) -> Part:
        plan = self._plan

        def measure() -> dict[str, Any]:
            engine = self._engine("host", plan.host_spec, plan.host_pool)
            sizes = DecodeSizes(
                batch=batch,
                context_len=_context_len(engine, plan.host_pool),
                num_warm_up=plan.num_warm_up,
                num_steps=plan.num_host_steps,
            )
            return measure_host(self._device, engine, plan.host_spec, sizes)

        return self._part(f"host share of a step, batch {batch}", "host", measure)

    def _contest(self, name: str) -> Part:
        plan, shape = self._plan, self._plan.contest_shape
        spec = plan.shapes[shape]

        def measure() -> dict[str, Any]:
            # Here, for it imports transformers, which may be missing.
            from benchmarks.gpu_peers import ContestSizes, measure_contest

            self.engines.close()
            size: Size = "small" if plan.has_small_workloads else "full"
            contest = contests(spec.vocab_size, size)[name]
            sizes = ContestSizes(
                num_runs=plan.num_contest_runs, num_peer_blocks=plan.num_peer_blocks
            )
            figures = measure_contest(
                self._device,
                spec,
                contest,
                self._floors,
                sizes,
                has_time=lambda: self._deadline.left_s() > plan.needs_s["generation"] / 3,
            )
            return {"shape": shape, **figures}

        return self._part(f"{name} {shape}", "generation", measure)


def _context_len(engine: DynamicInferenceEngine, wanted: PoolShape) -> int:
    """The longest context that all rows of the engine's pool can have at once."""
    blocks_per_row = engine.stats().num_blocks_total // wanted.num_rows
    return min(wanted.context_len, blocks_per_row * BLOCK_TOKENS)
