"""SamplingDefaults: values of sampling fields that a request leaves out.

`rollout.serve.server` makes the defaults, which `rollout.serve.sampling` applies. The values come
from generation_config.json if `ServeConfig.generation_config` is "auto".
`rollout.serve.sglang.generate` uses neutral values. `rollout.serve.config` imports
GENERATION_CONFIGS.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from rollout.errors import ConfigError
from rollout.json_files import read_optional_object
from rollout.ranges import Fraction, Interval, NonNegativeInt, PositiveInt, check_fields
from rollout.sampling_params import Temperature

_logger = logging.getLogger(__name__)

GENERATION_CONFIGS = ("vllm", "auto")
_FILE = "generation_config.json"
_MAX_TOKENS = "max_new_tokens"  # the file's name of max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values of sampling fields that a request leaves out. Without arguments they are neutral.

    max_tokens: most generated tokens of a chat or of /inference/v1/generate. None allows as many as
        fit.
    """

    temperature: Temperature = 1.0
    top_p: Annotated[float, Interval(0.0, 1.0)] = 1.0
    top_k: NonNegativeInt = 0
    min_p: Fraction = 0.0
    repetition_penalty: Annotated[float, Interval(0.01, 100.0)] = 1.0
    presence_penalty: Annotated[float, Interval(-2.0, 2.0)] = 0.0
    frequency_penalty: Annotated[float, Interval(-2.0, 2.0)] = 0.0
    max_tokens: PositiveInt | None = None

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


def sampling_defaults(directory: str | None, generation_config: str) -> SamplingDefaults:
    """Return the defaults of a server whose model is in `directory`. "vllm" gives neutral values.
    "auto" gives the values of generation_config.json in `directory`, or neutral values if there is
    no such file. Raises ConfigError for a value out of range."""
    if generation_config == "vllm" or directory is None:
        return SamplingDefaults()
    config = read_optional_object(Path(directory) / _FILE)
    names = {field.name: field.name for field in fields(SamplingDefaults)}
    names["max_tokens"] = _MAX_TOKENS
    given = {ours: config[name] for ours, name in names.items() if config.get(name) is not None}
    try:
        defaults = SamplingDefaults(**given)
    except ConfigError as fault:
        raise ConfigError(
            f"{directory}/{_FILE}: {fault}; correct it, or set generation_config='vllm'"
        ) from fault
    if given:
        _logger.info("defaults of sampling fields from %s: %s", _FILE, given)
    return defaults
