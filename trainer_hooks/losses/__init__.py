"""Policy and value losses on token log-probs, corrections for old tokens, and diagnostics.

Used by users' training loops, `trainer_hooks.update`, `trainer_hooks.train` and
`trainer_hooks.producer`.

Shape letters of the package: B rows (token sequences, see RolloutBatch), T positions of prompt and
completion, padded on the right. Column t of a log-prob tensor is the log-prob of token t. The mask
is 1 on the tokens to train on.
"""

from rollout.lazy_names import lazy_names as _lazy_names

# Module -> its names in this package. __init__.pyi lists the same names.
_HOMES = {
    "trainer_hooks.losses.config": "POLICY_LOSS_KINDS OffPolicyCorrection PolicyLossConfig",
    "trainer_hooks.losses.corrections": "correction_weights",
    "trainer_hooks.losses.diagnostics": "effective_sample_size",
    "trainer_hooks.losses.kl": "kl_estimate token_rewards",
    "trainer_hooks.losses.policy": "policy_loss value_loss",
    "trainer_hooks.losses.terms": "aggregate",
}
__getattr__, __all__ = _lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
