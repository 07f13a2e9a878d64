"""Rig: a scheduler with a fake worker, checked at every step against the naive model."""

from __future__ import annotations

from collections import deque

from rollout import SamplingParams
from rollout.blocks.kv_cache_manager import KVCacheManager
from rollout.scheduling.output import SchedulerOutput, StepUpdate
from rollout.scheduling.scheduler import Scheduler
from rollout.scheduling.stopping import StopRule, StopWord
from rollout.step.output import StepOutput
from rollout.step.plan import StepPlan
from rollout.version_spans import VersionSpans
from tests.fakes import FakeWorker
from tests.scheduling import invariants
from tests.scheduling.oracle import (
    Known,
    Prefixes,
    Sample,
    Sizes,
    in_phase,
    run_alone,
    scores_alone,
)


def make_scheduler(sizes: Sizes) -> Scheduler:
    prefixes = sizes.prefixes or Prefixes()
    kv_cache_manager = KVCacheManager(
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        num_rows=sizes.num_rows,
        enable_prefix_caching=sizes.prefixes is not None,
        keeps_unused=prefixes.lru,
        reuse_across_versions=prefixes.reuse_across_versions,
        max_age_versions=prefixes.max_age,
    )
    return Scheduler(
        kv_cache_manager,
        max_tokens=sizes.max_tokens,
        max_paused_blocks=sizes.max_paused_blocks,
        enable_chunked_prefill=sizes.chunked,
        schedule_conservativeness=sizes.conservativeness,
    )


class Rig:
    """Add requests, then call `step`, or `schedule`, `run` and `commit`; each call is checked."""

    def __init__(self, sizes: Sizes, version: int = 0) -> None:
        self.sizes, self.version = sizes, version
        self.worker = FakeWorker(
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            num_rows=sizes.num_rows,
            poison=sizes.poison,
        )
        self.scheduler = make_scheduler(sizes)
        self.kv_cache_manager = self.scheduler.kv_cache_manager
        self.known: dict[int, Known] = {}
        self.planned: deque[StepPlan] = deque()
        self.ran: deque[tuple[StepPlan, StepOutput]] = deque()
        self.plans: list[StepPlan] = []
        self.schedules: list[SchedulerOutput] = []
        self._handed_out: list[tuple[VersionSpans, VersionSpans]] = []

    # ---- requests

    def add(
        self, prompt: list[int], *samples: Sample, priority: int = 0, num_known: int = 0
    ) -> list[int]:
        """Queue samples of one prompt: a group, or, with `num_known`, requests of which so many
        tokens, or all but the last, are known from elsewhere. Returns their ids.
        """
        first = len(self.known)
        pool_tokens = self.sizes.num_blocks * self.sizes.block_size
        for sample in samples:
            request_id = len(self.known)
            rule = StopRule(
                end_ids=sample.end_ids,
                stop_words=tuple(StopWord(str(ids), ids) for ids in sample.stop_words),
                max_length=min(len(prompt) + sample.num_new, pool_tokens + 1),
            )
            tokens, _ = run_alone(prompt, sample, rule, self.sizes.poison)
            generated = tokens[:-1][:num_known]
            self.known[request_id] = Known(
                order=(-priority, request_id),
                prompt=prompt,
                sample=sample,
                rule=rule,
                generated=list(generated),
                is_begun=bool(generated),
            )
            self.scheduler.add_request(
                request_id,
                [*prompt, *generated],
                num_prompt=len(prompt),
                priority=priority,
                group_id=first if len(samples) > 1 and not num_known else None,
                sampling_params=SamplingParams(),
                seed=sample.seed,
                stop_rule=rule,
                wants_prompt_logprobs=sample.wants_scores and not generated,
            )
        return list(range(first, len(self.known)))

    def abort(self, request_id: int) -> None:
        self._hand_out(self.scheduler.finish_request(request_id))
        self.known[request_id].phase = "aborted"
        invariants.check_blocks(self.scheduler)

    def unfinished(self) -> list[int]:
        phases = ("waiting", "running", "paused")
        return [i for i, known in self.known.items() if known.phase in phases]

    def in_phase(self, phase: str) -> list[int]:
        return in_phase(self.known, phase)

    # ---- steps

    @property
    def num_in_flight(self) -> int:
        return len(self.planned) + len(self.ran)

    def schedule(self) -> StepPlan | None:
        """Plan one step and check the decision."""
        before = invariants.observe(self.scheduler)
        schedule = self.scheduler.schedule(self.version)
        promoted = set()  # it has waited longest: at the head whatever its priority
        for request_id, order in invariants.orders(self.scheduler).items():
            if self.known[request_id].order != order:
                self.known[request_id].order = order
                promoted.add(request_id)
        self._enter_decisions(schedule)
        invariants.check_schedule(
            self.scheduler, self.sizes, self.known, before, schedule, promoted
        )
        invariants.check_blocks(self.scheduler)
        self.schedules.append(schedule)
        if schedule.plan is not None:
            assert schedule.plan.weights_version == self.version
            self.planned.append(schedule.plan)
            self.plans.append(schedule.plan)
        return schedule.plan

    def run(self) -> None:
        """Run the oldest plan that the worker has not run yet."""
        plan = self.planned.popleft()
        self.ran.append((plan, self.worker.run(plan)))

    def commit(self) -> StepUpdate:
        """Commit the oldest result and check it against the naive model."""
        plan, output = self.ran.popleft()
        update = self.scheduler.update_from_output(plan, output)
        assert update.weights_version == plan.weights_version
        self._apply(plan, output, update)
        invariants.check_blocks(self.scheduler)
        if not self.planned:
            invariants.check_contents(self.scheduler, self.worker)
        return update

    def step(self) -> StepUpdate | None:
        """Plan, run and commit; None if there was nothing to run."""
        if self.schedule() is None:
            return None
        self.run()
        return self.commit()

    def step_alone(self, request_id: int) -> SchedulerOutput:
        """Plan, run and commit a step of one request."""
        self.settle()
        schedule = self.scheduler.schedule_alone(request_id, self.version)
        self._enter_decisions(schedule)
        invariants.check_blocks(self.scheduler)
        assert schedule.plan is not None
        self.planned.append(schedule.plan)
        self.run()
        self.commit()
        return schedule

    def settle(self) -> None:
        """Run and commit all plans in flight."""
        while self.planned:
            self.run()
        while self.ran:
            self.commit()

    def drain(self) -> None:
        """Step until all requests are done. No step may be idle, and their number is bounded."""
        self.settle()
        num_left = 20 + 3 * sum(self.known[i].rule.max_length for i in self.unfinished())
        while self.unfinished():
            num_left -= 1
            assert num_left >= 0, "starvation"
            while self.num_in_flight < self.sizes.depth and self.schedule() is not None:
                pass
            assert self.num_in_flight, "requests are left, but nothing runs"
            if self.planned:
                self.run()
            self.commit()
        self.settle()
        assert self.kv_cache_manager.used_blocks() == []
        self.drop_unused_blocks()
        assert self.scheduler.counts().num_blocks_indexed == 0
        for spans, as_handed_out in self._handed_out:
            assert spans == as_handed_out, "a request was stamped after it was gone"

    # ---- what happens between steps; nothing is in flight then

    def set_version(self, version: int) -> None:
        self.settle()
        if version != self.version:
            self.version = version
            self.kv_cache_manager.begin_weights_version()
            invariants.check_blocks(self.scheduler)

    def drop_unused_blocks(self) -> None:
        self.settle()
        self.kv_cache_manager.drop_unused_blocks()
        invariants.check_blocks(self.scheduler)
        assert self.scheduler.counts().num_blocks_indexed <= len(
            self.kv_cache_manager.used_blocks()
        )

    def requeue_older_than(self, version: int) -> None:
        self.settle()
        old = [
            i
            for i in sorted(self.unfinished(), key=lambda i: self.known[i].order)
            if len(self.scheduler.kv_spans(i)) and self.scheduler.kv_spans(i).min() < version
        ]
        requeued = self.scheduler.requeue_older_than(version)
        assert list(requeued) == old
        self._enter_requeued(requeued)

    def requeue_running(self) -> None:
        self.settle()
        active = [i for i in self.unfinished() if self.known[i].phase != "waiting"]
        requeued = self.scheduler.requeue_running()
        assert list(requeued) == sorted(active, key=lambda i: self.known[i].order)
        self._enter_requeued(requeued)
        assert self.kv_cache_manager.used_blocks() == []

    def fail_step(self, *, after_writes: bool) -> None:
        """Let a forward pass raise, before or after its work, which ends all plans in flight."""
        if self.num_in_flight < self.sizes.depth:
            self.schedule()
        if not self.num_in_flight:
            return
        while after_writes and self.planned:
            self.run()
        self.planned.clear()
        self.ran.clear()
        self._enter_requeued(self.scheduler.abandon())
        invariants.check_blocks(self.scheduler)
        invariants.check_contents(self.scheduler, self.worker)

    # ---- the naive model

    def _enter_decisions(self, schedule: SchedulerOutput) -> None:
        moves = (
            ("waiting", "running", schedule.admitted),
            ("running", "paused", schedule.paused),
            ("paused", "running", schedule.resumed),
        )
        for old, new, ids in moves:
            for request_id in ids:
                if request_id in schedule.preempted:
                    continue
                assert self.known[request_id].phase == old
                self.known[request_id].phase = new
        self._enter_requeued(schedule.preempted)

    def _enter_requeued(self, ids: tuple[int, ...]) -> None:
        for request_id in ids:
            known = self.known[request_id]
            assert known.phase in ("running", "paused")
            known.phase = "waiting"
            if not known.generated:
                known.scores = []

    def _apply(self, plan: StepPlan, output: StepOutput, update: StepUpdate) -> None:
        for scored in update.scored:
            assert self.known[scored.request_id].phase in ("running", "paused")
            assert output.scores is not None
            scores = output.scores.logprobs_P[scored.start : scored.end].tolist()
            self.known[scored.request_id].scores += scores
        prefilled = [prefilled.request_id for prefilled in update.prefilled]
        assert len(set(prefilled)) == len(prefilled)
        finished = {ended.request_id: ended for ended in update.finished}
        columns = (update.request_ids, update.token_ids, update.sample_indices)
        for request_id, token_id, index in zip(*columns, strict=True):
            known = self.known[request_id]
            assert known.phase in ("running", "paused")
            assert token_id == output.samples.token_ids_S[index]
            known.generated.append(token_id)
            context = self.worker.ran[plan.step_id].contexts[index]
            assert len(context) == len(known.prompt) + len(known.generated) - 1
            ended = finished.get(request_id)
            spans = self.scheduler.kv_spans(request_id) if ended is None else ended.kv_spans
            assert spans.to_array().tolist() == context
        for request_id, ended in finished.items():
            known = self.known[request_id]
            assert known.phase in ("running", "paused")
            assert (ended.error is None) == (ended.finish_reason in ("stop", "length"))
            self._hand_out(ended.kv_spans)
            known.phase, known.finish_reason = "done", ended.finish_reason
            self._check_finished(known)

    def _check_finished(self, known: Known) -> None:
        tokens, reason = run_alone(known.prompt, known.sample, known.rule, self.sizes.poison)
        # There is no token where the logits were not finite.
        assert known.generated == (tokens[:-1] if reason == "error" else tokens)
        assert known.finish_reason == reason
        if known.sample.wants_scores and not known.is_begun:
            assert known.scores == scores_alone(known.prompt)

    def _hand_out(self, spans: VersionSpans) -> None:
        self._handed_out.append((spans, spans.copy()))
