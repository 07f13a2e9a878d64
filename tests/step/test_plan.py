"""StepPlan: properties derived from its arrays."""

from __future__ import annotations

import numpy as np

from rollout.step.plan import StepPlan


def test_tokens_are_those_of_decode_rows_and_prefills() -> None:
    token_ids = np.array([7, 8], dtype=np.int32)
    plan = StepPlan(step_id=3, weights_version=1, num_decode_rows=1, prefill_token_ids=token_ids)
    assert plan.num_tokens == 3
    assert StepPlan(step_id=0, weights_version=0).num_tokens == 0
