"""Makes the log-prob objects of the openai protocol's replies from TokenData.

Used by `rollout.serve.openai` (completions, chat, tokens_in_out, reply). All functions are pure.
`Texts` is the type of a function that returns a token's text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollout.serve.samples import TokenData, finite

Texts = Callable[[int], str]


def _ranks(token_id: int, rank: int | None, top: dict[int, float]) -> dict[int, int]:
    """Return the rank of each token in `top`, the alternatives of `token_id` from TokenData.each.
    `rank` is the rank of `token_id`, or None to derive it from the log-probs."""
    others = [key for key in top if key != token_id]
    own = rank or 1 + sum(top[key] > top[token_id] for key in others)
    # `others` are in the order of their ranks, which skip the rank of `token_id`.
    ranks = {key: place + (place >= own) for place, key in enumerate(others, 1)}
    return {token_id: own, **ranks}


def spelling(texts: Texts, as_token_ids: bool) -> Texts:
    """Return the function that writes a token as `texts` does, or as `token_id:N`."""
    return (lambda token_id: f"token_id:{token_id}") if as_token_ids else texts


def completion_logprobs(
    data: TokenData, num_top: int, spell: Texts, offsets: Sequence[int]
) -> dict[str, Any]:
    """Return `logprobs` of a completion with `num_top` alternatives per token. `spell` writes a
    token. `offsets` are the starts of the tokens' texts in the choice's text."""
    rows = data.each(num_top)
    return {
        "tokens": [spell(token_id) for token_id in data.token_ids],
        "token_logprobs": [None if lp is None else finite(lp) for _, lp, _, _ in rows],
        "top_logprobs": [_by_text(top, spell) or None for *_, top in rows],
        "text_offset": list(offsets),
    }


def _by_text(top: dict[int, float], spell: Texts) -> dict[str, float]:
    """Return log-probs by text. If several tokens have the same text, the first one counts."""
    by_text: dict[str, float] = {}
    for token_id, log_prob in top.items():
        by_text.setdefault(spell(token_id), log_prob)
    return by_text


def chat_logprobs(
    data: TokenData, num_top: int, spell: Texts, bytes_of: Callable[[int], bytes]
) -> dict[str, Any]:
    """Return `logprobs` of a chat choice. `spell` writes a token and `bytes_of` returns its
    bytes."""

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
    """Return `logprobs` of /inference/v1/generate, by token id. `top_logprobs` begin with the token
    itself and have up to `num_top` + 1 entries."""
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
        "token": f"token_id:{token_id}",  # old and new clients read different keys
        "token_id": token_id,
        "logprob": None if log_prob is None else finite(log_prob),
        "rank": rank or None,
    }


def prompt_logprobs(data: TokenData, num_top: int, texts: Texts) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs`: the alternatives of each prompt token by id, with ranks. The
    prompt's own token comes first."""
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
