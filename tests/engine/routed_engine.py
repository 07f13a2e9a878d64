"""RoutedEngine: an engine whose layers write token, position and pass of a row in place of experts.

Each row of a record then says where it comes from, so a row of another request is detected.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgpack
import torch

from rollout import DynamicInferenceRequest, SamplingParams
from rollout.backends.forward_batch import ForwardBatch
from rollout.models.checkpoints.loading import build_model
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.step.output import StepOutput
from rollout.step.plan import StepPlan
from tests.engine.faulty_backend import failing_steps
from tests.tiny_mixtures import tiny_mixture
from tests.tiny_models import pool_gb, tiny_engine, tokens_of

VOCAB = 24
_BYTE = 256  # the record of 8 experts has a byte for each


@cache
def model() -> Any:
    return tiny_mixture(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        moe_intermediate_size=8,
    )


class RoutedEngine:
    """`sampled_in`: the passes that drew each request's tokens, in their order. `tokens`: of every
    returned request. `tally` counts comparisons.
    """

    def __init__(self, *, num_blocks: int, overlaps: bool, **config: Any) -> None:
        self.fault: str | None = None
        self.tally: Counter[str] = Counter()
        self.sampled_in: dict[int, list[int]] = defaultdict(list)
        self.tokens: dict[int, list[int]] = {}
        self._prefixes: dict[int, list[int]] = {}  # of unfinished requests, as last seen
        self._num_passes = 0
        self._step_of_pass: dict[int, int] = {}
        self._computed: dict[tuple[int, int], set[int]] = defaultdict(set)  # (step, position): ids
        causal_lm = build_model(model())
        causal_lm.register_forward_hook(lambda _module, args, _result: self._mark(args[0]))
        self.engine = tiny_engine(
            causal_lm,
            buffer_size_gb=pool_gb(model(), num_blocks, config["block_size_tokens"]),
            record_routing=True,
            change_backend=failing_steps(lambda: self.fault, overlaps=overlaps),
            **config,
        )
        scheduler: Any = self.engine.scheduler
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        self._schedule_alone = scheduler.schedule_alone
        scheduler.schedule = lambda *args: self._planned(self._schedule(*args))
        scheduler.schedule_alone = lambda *args: self._planned(self._schedule_alone(*args))
        scheduler.update_from_output = self._committed

    # ---- what the engine does

    def _mark(self, batch: ForwardBatch) -> None:
        routing_TLK = batch.routing_TLK
        assert routing_TLK is not None
        routing_TLK[:, 0, 0], routing_TLK[:, 0, 1] = batch.token_ids_T, batch.positions_T
        high, low = divmod(self._num_passes, _BYTE)
        routing_TLK[:, 1] = torch.tensor([low, high])
        self._num_passes += 1

    def _planned(self, output: Any) -> Any:
        self.tally["evictions"] += len(output.preempted)
        self.tally["forks"] += output.num_forked
        self.tally["hit tokens"] += output.num_prefix_hit_tokens
        if output.plan is not None:
            step = self.engine.scheduler.in_flight[-1]
            self.tally["copies on write"] += len(output.plan.copy_sources)
            for sequence, count in step.computed:
                end = sequence.num_computed
                for position in range(end - count, end):
                    self._computed[step.step_id, position].add(sequence.request_id)
        return output

    def _committed(self, plan: StepPlan, output: StepOutput) -> Any:
        assert output.routing_TLK is not None
        of_pass = _pass_of(output.routing_TLK[0])
        self._step_of_pass[of_pass] = plan.step_id
        update = self._update(plan, output)
        for request_id in update.request_ids:
            self.sampled_in[request_id].append(of_pass)
        return update

    # ---- what must hold

    def add(self, prompt: list[int], samples: list[SamplingParams]) -> list[int]:
        return self.engine.add_group(prompt, samples)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self._ended(record.merge() for record in self.engine.step())

    def abort(self, request_id: int) -> None:
        self._ended([self.engine.abort_request(request_id).merge()])

    def move(self, request_id: int) -> None:
        """Abort a request and add its record again, as if it came from another engine."""
        packed = msgpack.packb(self.engine.get_record(request_id).serialize())
        self.abort(request_id)
        record = DynamicInferenceRequestRecord.deserialize(msgpack.unpackb(packed))
        del self.tokens[self.engine.add_record(record)]

    def unfinished(self) -> list[int]:
        return self.engine.request_ids()

    def has_ended(self, request_id: int) -> bool:
        """Return whether the request has ended and its record was not returned yet."""
        return self.engine.get_record(request_id).current.finish_reason is not None

    def check_unfinished(self) -> None:
        """Check the records of unfinished requests."""
        self.engine.check_integrity(may_be_in_flight=True)
        for request_id in self.unfinished():
            self.check(self.engine.get_record(request_id).merge())

    def _ended(self, ended: Iterable[DynamicInferenceRequest]) -> None:
        requests = list(ended)
        self.tokens |= {request.request_id: tokens_of(request) for request in requests}
        for request in requests:
            self.check(request, is_whole=request.succeeded())

    def check(self, request: DynamicInferenceRequest, *, is_whole: bool = False) -> None:
        """Every known row is of its token, of its position, and of the pass that it ought to be of:
        the one that drew the next token, or one that computed the same prompt.
        """
        tokens, routing = tokens_of(request), request.routing_indices
        self._prefixes[request.request_id] = tokens
        if routing is None:
            assert not is_whole
            return
        assert routing.shape == (len(tokens) - 1, 2, 2)
        assert routing.dtype == torch.int16
        first_sampled = len(request.prompt_tokens) - 1
        sampled_in = self.sampled_in[request.request_id]
        for position, row in enumerate(routing):
            where = f"request {request.request_id}, position {position}"
            if int(row.min()) < 0:
                assert not is_whole, f"{where}: a finished request has all rows"
                assert (row == -1).all(), where
                # A token is known only with the row that it was drawn from.
                assert position < first_sampled or request.num_generated_tokens == 0, where
                self.tally["unknown rows"] += 1
                continue
            assert row[0].tolist() == [tokens[position], position], where
            of_pass = _pass_of(row)
            if position >= first_sampled and position - first_sampled < len(sampled_in):
                assert of_pass == sampled_in[position - first_sampled], where
            authors = self._computed[self._step_of_pass[of_pass], position]
            assert any(self._starts_alike(i, tokens[: position + 1]) for i in authors), where
            self.tally["rows"] += 1
            self.tally["rows of others"] += request.request_id not in authors

    def _starts_alike(self, request_id: int, tokens: list[int]) -> bool:
        known = self.tokens.get(request_id) or self._prefixes.get(request_id)
        if known is None or len(known) < len(tokens):
            known = tokens_of(self.engine.get_record(request_id).merge())
        return known[: len(tokens)] == tokens


def _pass_of(row: Any) -> int:
    low, high = row[1].tolist()
    return high * _BYTE + low
