"""Oracle: a list-based model of an engine, without blocks and batches.

It gets the scheduler's decisions and derives tokens, log-probs, versions, staleness and events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rollout import SamplingParams
from rollout.step.plan import StepPlan
from rollout.text import Tokenizer
from tests.engine.dense_model import DenseModel, Position
from tests.engine.known_request import Known
from tests.engine.trace import Chunk, Decision
from tests.tiny_models import Logits, expected_logprobs, possible_tokens, sampled_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Settings of the engine. `max_paused_blocks` None: no bound."""

    block_size: int
    num_blocks: int
    max_length: int
    max_tokens: int
    chunked: bool
    max_paused_blocks: int | None
    has_prefix_cache: bool
    is_isolated: bool
    max_age: int | None
    tracks_pauses: bool
    tracks_tokens: bool
    tokenizer: Tokenizer | None


class Oracle:
    """`models`: the weights of each version. `tally` counts what was compared."""

    def __init__(
        self, rules: Rules, models: dict[int, DenseModel], version: int, tally: Counter[str]
    ) -> None:
        self.rules, self.models, self.version, self.tally = rules, models, version, tally
        self.known: dict[int, Known] = {}
        self.exceptions: list[str] = []
        self._contents: dict[int, list[Position | None]] = {}  # who wrote the blocks of a hit
        self._num_arrivals = 0

    # ---- what the world does

    def add(
        self, request_id: int, prompt: list[int], params: SamplingParams, priority: int
    ) -> Known:
        rules = self.rules
        pool_tokens = rules.num_blocks * rules.block_size
        fits = min(rules.max_length, pool_tokens + 1)
        wanted = params.num_tokens_total or len(prompt) + (params.num_tokens_to_generate or fits)
        if params.num_tokens_total is None and params.num_tokens_to_generate is None:
            wanted = fits
        too_long = len(prompt) >= rules.max_length or len(prompt) > pool_tokens
        too_long |= len(prompt) > rules.max_tokens and not rules.chunked
        known = Known(
            request_id=request_id,
            priority=priority,
            order=self._behind_others(priority),
            prompt=list(prompt),
            params=params,
            entry_version=self.version,
            tokens=list(prompt),
            max_length=min(wanted, fits),
            is_clamped=wanted > fits,
            end_ids=self._end_ids(params),
            events=["ADD_ENGINE"],
        )
        self.known[request_id] = known
        if too_long:
            self._end(known, "error", ["ERROR_NONTRANSIENT", "FAIL"])
        elif known.is_clamped:
            known.events.append("ERROR_TRANSIENT")
        return known

    def add_record(self, known: Known) -> None:
        """A request that began elsewhere goes on here, behind all others of the priority that it
        was given: one that waited long enough to be promoted there has lost its place."""
        known.order = self._behind_others(known.priority)
        self.known.pop(known.request_id, None)
        self.known[known.request_id] = known
        self._requeue([known])
        if known.is_clamped:
            known.events.append("ERROR_TRANSIENT")

    def _behind_others(self, priority: int) -> tuple[int, int]:
        self._num_arrivals += 1
        return -priority, self._num_arrivals

    def _end_ids(self, params: SamplingParams) -> tuple[int, ...]:
        if params.ignore_eos:
            return ()
        end_id, tokenizer = params.termination_id, self.rules.tokenizer
        if end_id is None and tokenizer is not None:
            end_id = tokenizer.eos_id
        return () if end_id is None else (end_id,)

    def abort(self, known: Known) -> None:
        if not known.is_done:
            self._end(known, "abort", ["ERROR_NONTRANSIENT", "FAIL"])

    def requeue_active(self) -> None:
        """Requeue all requests with KV, which they lose."""
        self._requeue(known for known in self.unfinished() if known.phase != "waiting")

    def forget_unused(self, used_blocks: list[int]) -> None:
        """Drop the KV of all other blocks."""
        self._contents = {b: c for b, c in self._contents.items() if b in used_blocks}

    def set_version(self, version: int, model: DenseModel | None) -> None:
        """Commit an update; `model` None: no tensors. Requests with too old KV are requeued."""
        self.models[version] = self.models[self.version] if model is None else model
        self.version = version
        if self.rules.max_age is not None:
            oldest = version - self.rules.max_age
            self._requeue(
                known
                for known in self.unfinished()
                if known.kv and min(p.version for p in known.kv) < oldest
            )

    def abandon(self, decision: Decision, *, is_raised: bool) -> None:
        """Requeue the requests of a failed forward pass. `is_raised`: they get no error event."""
        self._decide(decision)
        touched = {c.request_id for c in decision.chunks} | set(decision.sampled)
        plan = decision.schedule.plan
        if plan is not None:  # whose block was to be a copy, even if it has no token in this step
            copied = set(plan.copy_targets.tolist())
            touched |= {i for i, table in decision.tables.items() if copied & set(table)}
        self._requeue(self.known[i] for i in touched)
        for i in () if is_raised else touched:
            self.known[i].events.append("ERROR_TRANSIENT")

    def unfinished(self) -> list[Known]:
        return [known for known in self.known.values() if not known.is_done]

    # ---- what the engine decides

    def draw(self, decision: Decision) -> list[tuple[Known, Logits]]:
        """Apply a decision. Returns the requests that sample and their logits, in order."""
        self._decide(decision)
        plan = decision.schedule.plan
        if plan is None:
            return []
        self._copy(plan)
        children = {child for _, child in decision.forks}
        logits = {}
        for chunk in decision.chunks:
            self._check_sole_writer(chunk, decision, children)
            logits[chunk.request_id] = self._compute(chunk, decision)
        for parent, child in decision.forks:
            assert self.known[child].tokens == self.known[parent].tokens == self.known[child].prompt
            self.known[child].kv = list(self.known[parent].kv)
            self._prefilled(self.known[child])
            logits[child] = logits[parent]
        return [(self.known[i], logits[i]) for i in decision.sampled]

    def take(self, known: Known, logits_V: Logits, token: int) -> None:
        """Append the engine's `token`, which must be the one that the logits and the seed give."""
        params, position = known.params, len(known.tokens)
        assert len(known.kv) == position
        self.tally["tokens"] += 1
        if token != sampled_token(logits_V, params, params.seed, position):
            outcomes = possible_tokens(logits_V, params, params.seed, position)
            where = f"request {known.request_id}, position {position}: {token}"
            assert token in outcomes, f"{where}, possible were {outcomes}"
            self.exceptions.append(where)
        versions = [entry.version for entry in known.kv]
        known.tokens.append(token)
        known.num_in_segment += 1
        known.policy.append(self.version)
        known.logprobs_TV.append(expected_logprobs(logits_V, params))
        known.context_min.append(min(versions))
        known.context_mean.append(sum(versions) / len(versions))
        if len(set(versions)) > 1:
            self.tally["tokens over mixed context"] += 1
        if self.rules.tracks_tokens:
            known.events.append("GENERATED_TOKEN")
        stops, word = known.params.stop_token_ids or (), self._stop_word(known)
        if token in (*known.end_ids, *stops) or word is not None:
            known.stop_reason = word
            if token in known.end_ids:
                known.stop_reason = None
            elif token in stops:
                known.stop_reason = token
                self.tally["stop token ids"] += 1
            self._end(known, "stop", ["FINISH"])
        elif len(known.tokens) == known.max_length:
            self._end(known, "length", ["FINISH"])

    def _stop_word(self, known: Known) -> str | None:
        """Return the stop word that begins first in the generated text, or None."""
        if not known.params.stop_words:
            return None
        assert self.rules.tokenizer is not None
        text = self.rules.tokenizer.decode(known.generated)
        said = [word for word in known.params.stop_words if word in text]
        self.tally["stop words"] += bool(said)
        return min(said, key=text.index, default=None)

    def _decide(self, decision: Decision) -> None:
        schedule = decision.schedule
        self._check_order(decision)
        self._requeue((self.known[i] for i in schedule.preempted), evicted=True)
        for ids, phase in ((schedule.paused, "paused"), (schedule.resumed, "running")):
            for request_id in ids:
                self._move(request_id, phase)
        for request_id in schedule.admitted:
            assert self.known[request_id].phase == "waiting"
            self._move(request_id, "running")
        children = {child for _, child in decision.forks}
        starts = {chunk.request_id: chunk.start for chunk in decision.chunks}
        hits = [i for i in schedule.admitted if i not in children]
        for request_id in hits:
            self._share(self.known[request_id], starts[request_id], decision.tables[request_id])
        assert schedule.num_prefix_hit_tokens == sum(starts[i] for i in hits)
        self.tally["forks"] += len(decision.forks)
        self.tally["evictions"] += len(schedule.preempted)
        self.tally["pauses"] += len(schedule.paused)

    def _move(self, request_id: int, phase: str) -> None:
        known = self.known[request_id]
        known.phase = phase
        if phase == "paused" and self.rules.tracks_pauses:
            known.events.append("PAUSE")

    def _check_order(self, decision: Decision) -> None:
        """Check the order: the oldest is admitted first, the newest preempted first, and no request
        is admitted while others lack blocks."""
        if decision.is_alone:
            assert len(decision.chunks) == 1
            self.tally["steps of one request alone"] += 1
            return
        schedule, promoted = decision.schedule, set[int]()
        for request_id, order in decision.orders.items():
            known = self.known[request_id]
            if order[0] != known.order[0]:
                assert order[0] < known.order[0]
                known.order = (order[0], known.order[1])
                promoted.add(request_id)
        orders = {i: k.order for i, k in self.known.items()}
        active = [k for k in self.unfinished() if k.phase != "waiting"]
        paused = [orders[i] for i in decision.paused]
        for request_id in schedule.preempted:
            assert orders[request_id] > min(k.order for k in active)
            assert all(orders[request_id] > order for order in paused)
        limit, held = self.rules.max_paused_blocks, [decision.tables[i] for i in decision.paused]
        if limit is not None and len(decision.paused) > 1:
            assert sum(map(len, held)) <= limit
        children = {child for _, child in decision.forks}
        entered = [i for i in schedule.admitted if i not in children]
        if entered:
            assert not schedule.preempted
            assert not paused
            newest = max((orders[i] for i in entered if i not in promoted), default=(-99, 0))
            assert all(newest < orders[i] for i in decision.waiting if i not in promoted)
        # Without chunked prefill a prompt may have a step of its own.
        is_prefill_alone = not self.rules.chunked and entered and not schedule.plan.num_decode_rows
        if active and schedule.plan is not None and not is_prefill_alone:
            oldest = min(active, key=lambda k: k.order).request_id
            assert oldest in {chunk.request_id for chunk in decision.chunks}

    # ---- KV

    def _share(self, known: Known, num_hit: int, table: tuple[int, ...]) -> None:
        """Positions [0, num_hit) come from blocks that others wrote."""
        rules = self.rules
        assert not known.kv
        if not num_hit:
            return
        assert rules.has_prefix_cache
        assert num_hit % rules.block_size == 0
        assert num_hit < len(known.tokens), "the last token's logits must be computed"
        assert not known.wants_scores or known.policy, "a scored prompt takes no hit"
        for block in table[: num_hit // rules.block_size]:
            assert block in self._contents, "a block whose KV is gone was served"
            known.kv += self._contents[block]
        assert [entry.token for entry in known.kv] == known.tokens[:num_hit]
        versions = {entry.version for entry in known.kv}
        if rules.is_isolated:
            assert versions == {self.version}, "a block over older context was served"
        if rules.max_age is not None:
            assert min(versions) >= self.version - rules.max_age
        self.tally["prefix hit tokens"] += num_hit
        self.tally["hit tokens of older versions"] += sum(
            entry.version < self.version for entry in known.kv
        )

    def _copy(self, plan: StepPlan) -> None:
        copies = zip(plan.copy_sources.tolist(), plan.copy_targets.tolist(), strict=True)
        for source, target in copies:
            self._contents[target] = list(self._contents[source])
            self.tally["copies on write"] += 1

    def _check_sole_writer(self, chunk: Chunk, decision: Decision, children: set[int]) -> None:
        """A shared block is never written; children of a fork share what was just computed."""
        size = self.rules.block_size
        table = decision.tables[chunk.request_id]
        written = set(table[chunk.start // size : -(-chunk.end // size)])
        for request_id, other in decision.tables.items():
            if request_id != chunk.request_id and request_id not in children:
                assert not written & set(other)

    def _compute(self, chunk: Chunk, decision: Decision) -> Logits:
        known, size = self.known[chunk.request_id], self.rules.block_size
        assert chunk.start == len(known.kv)
        tokens = known.tokens[chunk.start : chunk.end]
        entries, logits_TV = self.models[decision.version].extend(
            known.kv, tokens, decision.version
        )
        known.kv += entries
        table = decision.tables[chunk.request_id]
        for position, entry in enumerate(entries, start=chunk.start):
            content = self._contents.setdefault(table[position // size], [None] * size)
            content[position % size] = entry
        if known.wants_scores and not known.policy:
            last = min(chunk.end, len(known.prompt) - 1)
            for position in range(chunk.start, last):
                scores_V = expected_logprobs(logits_TV[position - chunk.start], SamplingParams())
                known.scores_TV.append(scores_V)
        if not known.in_context and chunk.end == len(known.tokens):
            self._prefilled(known)
        return logits_TV[-1]

    def _prefilled(self, known: Known) -> None:
        known.in_context = True
        known.events.append("ADD_CONTEXT")

    def _requeue(self, requests: Iterable[Known], *, evicted: bool = False) -> None:
        for known in requests:
            known.phase, known.kv, known.in_context = "waiting", [], False
            if not known.policy:
                known.scores_TV = []
            if evicted or known.num_in_segment:
                known.num_segments += 1
                known.num_in_segment = 0
            if evicted:
                known.events.append("EVICT")

    def _end(self, known: Known, reason: str, events: list[str]) -> None:
        known.phase, known.finish_reason, known.ended_at = "done", reason, self.version
        known.events += events
