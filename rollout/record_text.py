"""The text of a record, for whoever hands it to a user."""

from __future__ import annotations

import logging

from rollout.errors import DetokenizeError
from rollout.generated_text import shown_text
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.text import Tokenizer

_logger = logging.getLogger(__name__)


def add_text(record: DynamicInferenceRequestRecord, tokenizer: Tokenizer | None) -> None:
    """Set `generated_text` of the segments, which `merge` joins, unless it is there already.

    A stop word, or a stop token, is left out of the text, not of the tokens, unless
    `detokenize_stop_sequence`. A tokenizer that raises leaves the record without a text, and with
    the error among its events. Without a tokenizer nothing is done.
    """
    segments, last = record.requests, record.current
    written = [s for s in segments if s.num_generated_tokens] or [last]
    is_known = written[-1].generated_text is not None or any(s.has_no_text for s in segments)
    if tokenizer is None or is_known or last.sampling_params is None:
        return
    try:
        text = shown_text(
            tokenizer,
            [token for segment in written for token in segment.generated_tokens],
            segments[0].prompt_tokens,
            finish_reason=last.finish_reason,
            stop_word_ids=last.stop_word_ids,
            sampling_params=last.sampling_params.serialize(),
        )
    except DetokenizeError as error:
        _logger.warning("request %d has no text: %s", record.request_id, error)
        last.add_text_error(error)
        return
    # The text of the whole is not that of its segments, one after the other: a character may lie
    # across two of them.
    for segment in written:
        segment.generated_text = ""
    written[-1].generated_text = text
