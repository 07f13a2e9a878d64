"""Keeps a number of groups in flight in the engine, across weight updates."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from examples.grpo.settings import AlgorithmSettings
from examples.grpo.task import Problem, ProblemStream
from rollout import LLM, DynamicInferenceRequest, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """The rollouts of one problem, in sample order."""

    problem: Problem
    requests: list[DynamicInferenceRequest]


class GroupSampler:
    """Submits groups and collects the first that finish; the others go on in the next phase."""

    def __init__(
        self,
        llm: LLM,
        stream: ProblemStream,
        tokenizer: PreTrainedTokenizerFast,
        settings: AlgorithmSettings,
    ) -> None:
        self._llm = llm
        self._stream = stream
        self._tokenizer = tokenizer
        self._settings = settings
        self.params = SamplingParams(
            temperature=settings.temperature,
            num_tokens_to_generate=settings.max_new_tokens,
            termination_id=tokenizer.eos_token_id,
            return_log_probs=True,
            logprobs_mode="temperature",
        )
        self._in_flight: dict[int, Problem] = {}

    def collect(self) -> list[FinishedGroup]:
        """Fill the engine up, then run it until a step's number of groups is done."""
        new = self._stream.take(self._settings.groups_in_flight - len(self._in_flight))
        prompts = [self._tokenizer.encode(problem.question) for problem in new]
        group_ids = self._llm.submit(prompts, self.params, n=self._settings.group_size)
        self._in_flight.update(zip(group_ids, new, strict=True))
        return [
            FinishedGroup(problem=self._in_flight.pop(group.group_id), requests=group.requests)
            for group in self._llm.collect(num_groups=self._settings.groups_per_step)
        ]

    def state_dict(self) -> dict[str, object]:
        """Where the problems stand: for a ProblemStream that goes on after a restart."""
        unfinished = [problem.index for problem in self._in_flight.values()]
        return {"position": self._stream.position, "unfinished": unfinished}
