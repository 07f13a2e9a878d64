"""Policy and value losses on token log-probs, the corrections for old tokens, and diagnostics.

Used by users' training loops, `trainer_hooks.update` and the training job.

Shape letters of the package: B rows (token sequences; see RolloutBatch), T positions of prompt +
completion, right padded.
Column t of a log-prob tensor is the log-prob of token t. The mask is 1 on the tokens trained on.
"""

from trainer_hooks.losses.config import (
    POLICY_LOSS_KINDS,
    OffPolicyCorrection,
    PolicyLossConfig,
)
from trainer_hooks.losses.corrections import correction_weights
from trainer_hooks.losses.diagnostics import effective_sample_size
from trainer_hooks.losses.kl import kl_estimate, token_rewards
from trainer_hooks.losses.policy import policy_loss, value_loss
from trainer_hooks.losses.terms import aggregate

__all__ = [
    "OffPolicyCorrection",
    "POLICY_LOSS_KINDS",
    "PolicyLossConfig",
    "aggregate",
    "correction_weights",
    "effective_sample_size",
    "kl_estimate",
    "policy_loss",
    "token_rewards",
    "value_loss",
]
