"""TRLRollouts: lets TRL's GRPOTrainer generate with an LLM of this package.

Used by users' TRL scripts, examples/train_trl.py and `benchmarks.trl_step`. TRLRollouts pushes the
trainer's weights into the LLM, submits requests, resumes the LLM before them and suspends it
afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from rollout import LLM, DynamicInferenceRequest
from rollout.errors import ConfigError, RolloutError
from rollout.step.seeds import mix_seed
from trainer_hooks.phase import generation_phase
from trainer_hooks.trl_settings import check_trainer, sampling_params_of
from trainer_hooks.weight_sync import WeightSync


class TRLRollouts:
    """The `rollout_func` of a trl.GRPOTrainer (TRL 1.x).

        rollouts = TRLRollouts(llm)
        trainer = GRPOTrainer(..., rollout_func=rollouts)
        rollouts.attach(trainer)

    The trainer's weights are pushed at the first generation of each training step. Between two
    generations the engine is suspended and its KV memory released. An attached trainer treats this
    object as its vLLM engine, so `vllm_importance_sampling_correction` and the `sampling/*` metrics
    compare the trainer's log-probs with the engine's.

    Seeds derive from the engine's `seed`, the trainer's process index and its step. Processes with
    equal engine seeds therefore draw different samples. A resumed trainer does not repeat the seeds
    of earlier steps.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._weight_sync = WeightSync(llm)
        self._are_weights_old = True
        self._latest_call = (-1, -1)  # the trainer's step, and the index of the call in that step

    def attach(self, trainer: Any) -> None:
        """Make `trainer` report new weights and use the engine's log-probs. Call this before
        training.

        Sets the trainer's `use_vllm`, `vllm_generation` and `_last_loaded_step`.
        Raises ConfigError for settings of the trainer that this engine cannot follow.
        """
        check_trainer(trainer)
        trainer.use_vllm, trainer.vllm_generation = True, self
        trainer._last_loaded_step = -1

    def sync_weights(self) -> None:
        """Mark the weights as changed. The next generation pushes them. The trainer calls this."""
        self._are_weights_old = True

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[list[Any]]]:
        """Generate one completion for each of `prompts`, which are texts or lists of chat messages.

        Returns `prompt_ids`, `completion_ids` and `logprobs`, each with one list per prompt.
        Adjacent equal prompts form one group and share the KV cache of their prompt. Raises
        RolloutError if a request fails. Raises ConfigError for settings of the trainer that this
        engine cannot follow (see `trl_settings`), and for prompts with images, video or sound.
        """
        check_trainer(trainer)
        groups = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
        params, seed = sampling_params_of(trainer), self._next_seed(trainer)
        push: tuple[Any, ...] = ()
        if self._are_weights_old:
            push = (self._weight_sync, trainer.accelerator.unwrap_model(trainer.model))
        with generation_phase(self._llm, *push):
            self._are_weights_old = False
            group_ids = [
                self._llm.submit(
                    [_token_ids(prompt, trainer)],
                    replace(params, seed=mix_seed(seed, index)),
                    n=count,
                )[0]
                for index, (prompt, count) in enumerate(groups)
            ]
            finished = {group.group_id: group.requests for group in self._llm.collect()}
        requests = [request for group_id in group_ids for request in finished[group_id]]
        return _as_output(requests)

    def _next_seed(self, trainer: Any) -> int:
        step = int(trainer.state.global_step)
        latest_step, num_calls = self._latest_call
        self._latest_call = (step, num_calls + 1 if step == latest_step else 0)
        return mix_seed(self._llm.seed, trainer.accelerator.process_index, *self._latest_call)


def _token_ids(prompt: Any, trainer: Any) -> list[int]:
    tokenizer = trainer.processing_class
    if isinstance(prompt, str):
        return list(tokenizer(text=prompt)["input_ids"])
    if any(not _is_text(message) for message in prompt):
        raise ConfigError(
            f"a prompt with images, video or sound, {prompt!r:.200}: TRLRollouts has models of "
            "text only"
        )
    tokenized = tokenizer.apply_chat_template(
        conversation=prompt,
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return list(tokenized["input_ids"])


def _is_text(message: Any) -> bool:
    content = message.get("content")
    return not isinstance(content, list) or all(
        isinstance(part, str) or part.get("type") == "text" for part in content
    )


def _as_output(requests: Sequence[DynamicInferenceRequest]) -> dict[str, list[list[Any]]]:
    for request in requests:
        if not request.succeeded():
            raise RolloutError(
                f"request {request.request_id} failed ({request.finish_reason}), and a GRPOTrainer "
                "needs a completion for every prompt; check that the engine's max_sequence_length "
                "is at least the longest prompt + max_completion_length"
            )
    return {
        "prompt_ids": [request.prompt_tokens.tolist() for request in requests],
        "completion_ids": [list(request.generated_tokens) for request in requests],
        "logprobs": [torch.as_tensor(request.generated_log_probs).tolist() for request in requests],
    }
