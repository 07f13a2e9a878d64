"""Log-probs in the forms of the openai protocol's endpoints.

Used by `rollout.serve.openai` (completions, chat, tokens_in_out and reply). Each function turns
TokenData into JSON; Texts returns the text of a token id. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollout.serve.samples import TokenData, finite

Texts = Callable[[int], str]


def _ranks(token_id: int, rank: int | None, top: dict[int, float]) -> dict[int, int]:
    """Return the rank of each token of `top`, the alternatives of a row of TokenData.each. rank:
    the rank of `token_id` itself; None ranks it among the alternatives by log-prob."""
    others = [key for key in top if key != token_id]
    own = rank or 1 + sum(top[key] > top[token_id] for key in others)
    # The others stand in the order of their ranks, which skip the token's own.
    ranks = {key: place + (place >= own) for place, key in enumerate(others, 1)}
    return {token_id: own, **ranks}


def spelling(texts: Texts, as_token_ids: bool) -> Texts:
    """Return the function that writes tokens: as their text, or as `token_id:N`."""
    return (lambda token_id: f"token_id:{token_id}") if as_token_ids else texts


def completion_logprobs(
    data: TokenData, num_top: int, spell: Texts, offsets: Sequence[int]
) -> dict[str, Any]:
    """Return `logprobs` of a completion. num_top: number of alternatives. spell: writes a token.
    offsets: start of each token's text in the choice's text."""
    rows = data.each(num_top)
    return {
        "tokens": [spell(token_id) for token_id in data.token_ids],
        "token_logprobs": [None if lp is None else finite(lp) for _, lp, _, _ in rows],
        "top_logprobs": [_by_text(top, spell) or None for *_, top in rows],
        "text_offset": list(offsets),
    }


def _by_text(top: dict[int, float], spell: Texts) -> dict[str, float]:
    """Return log-probs by text. Of several tokens with the same text, such as parts of characters,
    the first counts."""
    by_text: dict[str, float] = {}
    for token_id, log_prob in top.items():
        by_text.setdefault(spell(token_id), log_prob)
    return by_text


def chat_logprobs(
    data: TokenData, num_top: int, spell: Texts, bytes_of: Callable[[int], bytes]
) -> dict[str, Any]:
    """Return `logprobs` of a chat choice, with one entry for each token. bytes_of: returns the
    bytes of a token."""

    def entry(token_id: int, log_prob: float | None) -> dict[str, Any]:
        return {
            "token": spell(token_id),
            "logprob": None if log_prob is None else finite(log_prob),
            "bytes": list(bytes_of(token_id)),
        }

    return {
        "content": [
            {
                **entry(token_id, lp),
                "top_logprobs": [entry(i, v) for i, v in list(top.items())[:num_top]],
            }
            for token_id, lp, _, top in data.each(num_top)
        ]
    }


def token_logprobs(data: TokenData, num_top: int) -> dict[str, Any]:
    """Return `logprobs` of /inference/v1/generate, by token id. Entries have keys for old and new
    clients. `top_logprobs` begin with the token itself, so there may be `num_top` + 1 of them."""
    content = []
    for token_id, log_prob, rank, top in data.each(num_top):
        ranks = _ranks(token_id, rank, top) if top else {}
        content.append(
            {
                **_token_entry(token_id, log_prob, rank),
                "top_logprobs": [_token_entry(i, v, ranks[i]) for i, v in top.items()],
            }
        )
    return {"content": content}


def _token_entry(token_id: int, log_prob: float | None, rank: int | None) -> dict[str, Any]:
    return {
        "token": f"token_id:{token_id}",
        "token_id": token_id,
        "logprob": None if log_prob is None else finite(log_prob),
        "rank": rank or None,
    }


def prompt_logprobs(data: TokenData, num_top: int, texts: Texts) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs`: alternatives by id with ranks, the prompt's own token first."""
    rows: list[dict[str, Any] | None] = []
    for token_id, log_prob, rank, top in data.each(num_top):
        if log_prob is None:
            rows.append(None)
            continue
        ranks = _ranks(token_id, rank, top)
        rows.append(
            {
                str(i): {"logprob": v, "rank": ranks[i], "decoded_token": texts(i)}
                for i, v in top.items()
            }
        )
    return rows
