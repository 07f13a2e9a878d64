"""Makes or loads the LoRA adapter of a job, as a PEFT model over the base weights.

`trainer_hooks.train.main` makes a new adapter. `trainer_hooks.train.learner` loads one from a
checkpoint. Files are only read.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rollout.errors import ConfigError
from trainer_hooks.pretrained import load_pretrained
from trainer_hooks.train.settings import LoraSettings


def new_adapter(base: Path | str, settings: LoraSettings) -> Any:
    """Return a PEFT model over the model in `base`, with a new adapter, which changes no outputs
    yet. Raises ConfigError if PEFT is missing, and for layers that the model lacks."""
    peft = _peft()
    own = asdict(settings)
    config = peft.LoraConfig(
        r=own.pop("rank"), lora_alpha=own.pop("alpha"), task_type="CAUSAL_LM", **own
    )
    try:
        return peft.get_peft_model(_base(base), config)
    except ValueError as error:
        raise ConfigError(
            f"model.lora.target_modules={settings.target_modules!r}: {error}"
        ) from error


def load_adapter(base: Path | str, checkpoint: Path, settings: LoraSettings) -> Any:
    """Return a trainable PEFT model over the model in `base`, with the adapter in `checkpoint`.
    Raises ConfigError if PEFT is missing or the checkpoint's adapter does not match `settings`."""
    peft = _peft()
    if not (checkpoint / "adapter_config.json").exists():
        raise ConfigError(
            f"model.lora is set, but the policy in {checkpoint} is a whole model; resume with the "
            "settings that the run began with, or start one with another run_name"
        )
    saved = peft.LoraConfig.from_pretrained(str(checkpoint))
    for name, found, wanted in (
        ("rank", saved.r, settings.rank),
        ("alpha", saved.lora_alpha, settings.alpha),
        ("use_rslora", saved.use_rslora, settings.use_rslora),
    ):
        if found != wanted:
            raise ConfigError(
                f"model.lora.{name}={wanted}, but the adapter in {checkpoint} has {found}; resume "
                "with the settings that the run began with, or start one with another run_name"
            )
    return peft.PeftModel.from_pretrained(_base(base), str(checkpoint), is_trainable=True)


def _base(path: Path | str) -> Any:
    kind, options = AutoModelForCausalLM, {"dtype": torch.float32}
    return load_pretrained(kind, "model.path", str(path), **options)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            "model.lora needs the package peft: pip install peft (extra 'lora'), "
            "or leave model.lora out"
        ) from error
    return peft
