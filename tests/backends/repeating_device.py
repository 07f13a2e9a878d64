"""RepeatingDevice: stands for CUDA's graphs and streams on a machine without a GPU.

Nothing else is fake. `graph_engine` makes an engine that runs on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout import DynamicInferenceEngine, SamplingParams
from rollout.backends.base import AttentionBackend, Ops
from rollout.backends.buffers import MemoryBackend
from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.cuda.cuda_graph import CudaGraphs
from rollout.backends.cuda.graph import GraphExecutor, Ran
from rollout.backends.cuda.graph_shapes import GraphShapes, make_graph_shapes
from rollout.backends.executors.transfer import download
from rollout.backends.forward_batch import PLAIN, AttentionTraits, ForwardBatch, Rotation
from rollout.backends.step_tensors import Fetch
from rollout.step.output import StepOutput, map_arrays
from tests.backends.fake_graphs import FakeTorchCuda
from tests.contracts.reference_attention import ReferenceAttention
from tests.tiny_models import Margins, drain, prompt_of, tiny_engine

CPU = torch.device("cpu")


class RepeatingDevice:
    """A replay runs the captured program again, with the host values that it was captured with.

    Captures obey the rules of torch's pools of graphs.
    """

    def __init__(self, cuda: FakeTorchCuda | None = None) -> None:
        self.cuda = cuda or FakeTorchCuda()
        self._graphs = CudaGraphs(CPU, self.cuda)
        self.num_replays = 0
        # Called where a step is captured, behind its program.
        self.in_capture: Callable[[], object] = lambda: None
        self._results: list[Ran] = []
        self._num_lost = 0

    def lose_graphs(self, token_id: int) -> None:
        """From now on a replay of what is captured so far leaves `token_id` for every sample."""
        self._num_lost = len(self._results)
        for result in self._results:
            with torch.inference_mode():
                result.result.samples.token_ids_S.fill_(token_id)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def capture(self, program: Callable[[], Ran]) -> tuple[Callable[[], None], Ran]:
        def captured() -> Ran:
            self.cuda.product()
            self.cuda.allocate_for_a_moment(1 << 20)
            ran = program()
            if self.cuda.is_capturing:
                self.in_capture()
            return ran

        replay_nothing, static = self._graphs.capture(captured)
        number = len(self._results)
        self._results.append(static)

        def replay() -> None:
            replay_nothing()
            self.num_replays += 1
            if number < self._num_lost:
                return
            again = program()
            for target, source in zip(_tensors(static), _tensors(again), strict=True):
                target.copy_(source)

        return replay, static

    @property
    def num_bytes(self) -> int:
        return self._graphs.num_bytes

    @property
    def num_result_bytes(self) -> int:
        """Bytes of the tensors that captured steps leave their results in."""
        return sum(tensor.nbytes for ran in self._results for tensor in _tensors(ran))

    def forget(self) -> None:
        self._graphs.forget()

    def download(self, result: StepOutput[Tensor]) -> Fetch:
        """A copy, for the next replay overwrites the result."""
        return download(map_arrays(result, Tensor.clone), CPU)


def _tensors(ran: Ran) -> list[Tensor]:
    """Return all tensors that a captured step writes."""
    found = [ran.hidden_LE]
    map_arrays(ran.result, found.append)
    return found


class HostlessAttention(ReferenceAttention):
    """Reads lengths where a captured graph must read them, and tolerates its padding."""

    def attend(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        layer: int,
        batch: ForwardBatch,
        rotation: Rotation | None = None,
        traits: AttentionTraits = PLAIN,
    ) -> Tensor:
        assert rotation is not None
        count = int(batch.query_starts_E[-1])
        exact = replace(
            batch,
            token_ids_T=batch.token_ids_T[:count],
            positions_T=batch.positions_T[:count],
            slots_T=batch.slots_T[:count],
            query_starts=batch.query_starts_E.numpy(),
            context_lens=batch.context_lens_R.numpy(),
        )
        turn = replace(rotation, cos_TD=rotation.cos_TD[:count], sin_TD=rotation.sin_TD[:count])
        out_THD = torch.zeros_like(q_THD)
        parts = q_THD[:count], k_TGD[:count], v_TGD[:count]
        out_THD[:count] = super().attend(*parts, layer, exact, turn, traits)
        return out_THD


def graph_engine(
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    *,
    graph_shapes: GraphShapes | None = None,
    attention: AttentionBackend | None = None,
    ops: Ops | None = None,
    memory: MemoryBackend | None = None,
    **config: Any,
) -> tuple[DynamicInferenceEngine, GraphExecutor, RepeatingDevice]:
    """Return an engine whose steps are captured and replayed, its executor and its device.

    `monkeypatch` replaces the engine's backend.
    """
    device = RepeatingDevice()
    made: list[GraphExecutor] = []

    def create_backend(config: Any, *ranks: Any) -> Any:
        backend = cpu_backend("device")
        shapes = graph_shapes or make_graph_shapes(12, config.max_requests or 24, 6)
        made.append(GraphExecutor(CPU, device, shapes))
        return replace(
            backend,
            ops=ops or backend.ops,
            attention=attention or HostlessAttention(),
            memory=memory or backend.memory,
            executor=made[0],
            fuse_decoder=None,
        )

    monkeypatch.setattr("rollout.worker.loading.create_backend", create_backend)
    engine = tiny_engine(model, **config)
    return engine, made[0], device


def check_a_life_with_a_suspend(engine: DynamicInferenceEngine, model: Any) -> None:
    """A group and a request, greedy, drawn and truncated, are suspended on their way: all tokens
    are those of the oracle.
    """
    params = [
        SamplingParams(num_tokens_to_generate=20, seed=i, temperature=t, top_p=p)
        for i, (t, p) in enumerate([(0.0, 0.0), (1.0, 0.0), (0.8, 0.9)])
    ]
    engine.add_group(prompt_of(21, seed=0), params)
    engine.add_request(prompt_of(9, seed=1), params[1])
    finished = {record.request_id: record.merge() for _ in range(8) for record in engine.step()}
    engine.pause()
    engine.suspend("offload")
    engine.resume()
    engine.unpause()
    finished |= drain(engine)
    margins = Margins()
    for request in finished.values():
        margins.compare_with_oracle(model, request)
    margins.check()
    assert margins.num_tokens == 80
