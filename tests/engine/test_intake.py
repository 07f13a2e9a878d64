"""RequestIntake: what it makes of a request that another engine began."""

from __future__ import annotations

import torch

from rollout import DynamicInferenceRequest, DynamicInferenceRequestRecord, SamplingParams
from rollout.engine.intake import RequestIntake
from rollout.scheduling.admission import AdmissionLimits
from tests.engine.test_events import LetterTokenizer

LIMITS = AdmissionLimits(
    vocab_size=211,
    max_sequence_length=50,
    max_pool_tokens=50,
    max_tokens_per_step=50,
    enable_chunked_prefill=True,
    can_score_prompts=True,
)


def test_a_request_begun_elsewhere_knows_its_stop_words() -> None:
    intake = RequestIntake(
        limits=LIMITS,
        tokenizer=LetterTokenizer(),
        end_ids=(),
        block_size=8,
        enable_prefix_caching=False,
        seed=0,
    )
    request = DynamicInferenceRequest(
        request_id=3,
        prompt_tokens=torch.arange(4),
        sampling_params=SamplingParams(stop_words=["!", "#$"]),
        seed=0,
        generated_tokens=[7, 8],
    )
    record = DynamicInferenceRequestRecord.from_request(request)
    record.checkpoint()
    entry = intake.reenter(record)
    assert entry.stop_rule.stop_words == ((1,), (3, 4))
    assert [segment.stop_word_ids for segment in record.requests] == [[[1], [3, 4]]] * 2
    assert record.merge().stop_word_ids == [[1], [3, 4]]
