"""What a trainer recomputes: the log-prob of each token under its own model.

Shape letters: B rollouts, T positions, V vocabulary.
"""

from __future__ import annotations

import torch


def token_logprobs(
    logits_BTV: torch.Tensor, tokens_BT: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Log-prob of token t in column t, float32 [B, T], with a gradient; column 0 is 0.

    `logits_BTV[:, t]` predicts token t + 1. The same quantity as the engine's
    `logprobs_mode="temperature"`.
    """
    logits_BTV = logits_BTV[:, :-1].float() / temperature
    chosen_BT = logits_BTV.gather(-1, tokens_BT[:, 1:, None]).squeeze(-1)
    logprobs_BT = chosen_BT - logits_BTV.logsumexp(dim=-1)
    return torch.nn.functional.pad(logprobs_BT, (1, 0))
