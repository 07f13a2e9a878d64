"""CheckedInputProcessor: refuses sampling parameters that vLLM cannot follow.

Also `end_ids` and `shared_settings` of a model's directory. Used by `rollout_vllm.engine` and
`rollout_vllm.server.engine`. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout.config import InferenceConfig
from rollout.engine.input_processor import InputProcessor, ProcessedRequest
from rollout.engine.shared_settings import SHARED_CONFIG_FIELDS, settings_as_texts
from rollout.models.checkpoints.reader import read_config
from rollout.models.spec import end_ids_of, union_of_ids
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.sampling_params import SamplingParams
from rollout.text import Tokenizer


class CheckedInputProcessor(InputProcessor):
    """An InputProcessor that also calls `check_params` with the parameters of each request. It
    raises InvalidRequestError for parameters that vLLM cannot follow."""

    check_params: Callable[[SamplingParams], None]

    def process_groups(
        self, groups: Any, *arguments: Any, **named: Any
    ) -> list[list[ProcessedRequest]]:
        for _, list_of_params in groups:
            for params in list_of_params:
                self.check_params(params)
        return super().process_groups(groups, *arguments, **named)

    def process_record(
        self, record: DynamicInferenceRequestRecord, *arguments: Any, **named: Any
    ) -> ProcessedRequest:
        if (params := record[0].sampling_params) is not None:
            self.check_params(params)
        return super().process_record(record, *arguments, **named)


def end_ids(directory: Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the ids that end a request: the tokenizer's, and those of the model's directory."""
    own = None if tokenizer is None else tokenizer.eos_id
    return tuple(union_of_ids(own, end_ids_of(read_config(directory), str(directory))))


def shared_settings(
    inputs: InputProcessor,
    config: InferenceConfig,
    directory: Path,
    *,
    dtype: str,
    quantization: str | None,
    logprobs_mode: str,
) -> dict[str, str]:
    """Return what engines of a fleet must share: all of the model's config, what vLLM computes
    with, and what decides about requests and updates."""
    values: dict[str, Any] = {
        "max_sequence_length": inputs.max_sequence_length,
        "end_token_ids": sorted(inputs.end_ids),
        "dtype": dtype,
        "quantization": quantization,
        "logprobs_mode": logprobs_mode,
    }
    values |= {name: getattr(config, name) for name in SHARED_CONFIG_FIELDS}
    values |= {f"config.{name}": value for name, value in read_config(directory).items()}
    return settings_as_texts(values)
