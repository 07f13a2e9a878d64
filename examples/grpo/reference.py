"""The reference policy of the KL term: the policy as the warm-up left it, frozen."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout.errors import ConfigError
from trainer_hooks import PolicyLossConfig

_DIRECTORY = "reference"


def save_reference(policy: PreTrainedModel, directory: Path, loss: PolicyLossConfig) -> None:
    """Keep `policy` in the run's `directory`, if the loss has a KL term.

    Checkpoints do not: the oldest are deleted, and a resumed run needs the same reference.
    """
    if loss.kl_coefficient > 0.0:
        policy.save_pretrained(directory / _DIRECTORY)


def load_reference(directory: Path, loss: PolicyLossConfig) -> PreTrainedModel | None:
    """What `save_reference` kept of the run; None if the loss has no KL term.

    Raises ConfigError if it kept nothing, because the run began without a KL term.
    """
    if loss.kl_coefficient == 0.0:
        return None
    saved = directory / _DIRECTORY
    if not saved.exists():
        raise ConfigError(
            f"algorithm.loss.kl_coefficient={loss.kl_coefficient} needs the reference policy "
            f"{saved}, which a run that began with 0 does not have; start over with resume=never"
        )
    return AutoModelForCausalLM.from_pretrained(saved).requires_grad_(False)
