"""Policy and value losses on token log-probs, the corrections for old tokens, and diagnostics."""

from trainer_hooks.losses.config import POLICY_LOSS_KINDS as POLICY_LOSS_KINDS
from trainer_hooks.losses.config import OffPolicyCorrection as OffPolicyCorrection
from trainer_hooks.losses.config import PolicyLossConfig as PolicyLossConfig
from trainer_hooks.losses.corrections import correction_weights as correction_weights
from trainer_hooks.losses.diagnostics import effective_sample_size as effective_sample_size
from trainer_hooks.losses.kl import kl_estimate as kl_estimate
from trainer_hooks.losses.kl import token_rewards as token_rewards
from trainer_hooks.losses.policy import policy_loss as policy_loss
from trainer_hooks.losses.policy import value_loss as value_loss
from trainer_hooks.losses.terms import aggregate as aggregate

__all__: list[str]
