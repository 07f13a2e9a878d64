"""TokenData: tokens with what was reported of them, and the log-prob lists of the endpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.token_runs import TokenRun

# As vLLM writes a log-prob of minus infinity: JSON has none.
_LOWEST = -9999.0

Texts = Callable[[int], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenData:
    """token_ids, and for each token its log-prob, its rank, and the most likely tokens, where they
    were asked for. None stands for what is not known, as of a prompt's first token.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float | None] | None = None
    ranks: Sequence[int | None] | None = None
    top: Sequence[dict[int, float] | None] | None = None

    def __add__(self, other: TokenData) -> TokenData:
        """Return these tokens followed by `other`, with what both have."""
        return TokenData(
            token_ids=[*self.token_ids, *other.token_ids],
            log_probs=_joined(self.log_probs, other.log_probs),
            ranks=_joined(self.ranks, other.ranks),
            top=_joined(self.top, other.top),
        )

    def each(self, num_top: int) -> list[tuple[int, float | None, int | None, dict[int, float]]]:
        """Return (id, log-prob, rank, {id: log-prob} of itself and then the `num_top` most likely).

        A token that is among the most likely stands once, in the first place.
        """
        count = len(self.token_ids)
        log_probs = self.log_probs or [None] * count
        ranks, top = self.ranks or [None] * count, self.top or [None] * count
        rows = zip(self.token_ids, log_probs, ranks, top, strict=True)
        return [(i, lp, rank, _top(i, lp, own, num_top)) for i, lp, rank, own in rows]


def _joined(first: Any, second: Any) -> Any:
    return None if first is None or second is None else [*first, *second]


def _top(
    token_id: int, log_prob: float | None, top: dict[int, float] | None, num_top: int
) -> dict[int, float]:
    if log_prob is None:
        return {}
    chosen = {token_id: log_prob}
    for key, value in islice((top or {}).items(), num_top):
        chosen.setdefault(key, value)
    return {key: finite(value) for key, value in chosen.items()}


def _ranks(token_id: int, rank: int | None, top: dict[int, float]) -> dict[int, int]:
    """Return the rank of each entry of a row of `each`. rank: the token's own rank; without it the
    token is ranked among the entries by log-prob."""
    others = [key for key in top if key != token_id]
    own = rank or 1 + sum(top[key] > top[token_id] for key in others)
    # The others are in the order of their ranks, which leave out the token's own.
    ranks = {key: place + (place >= own) for place, key in enumerate(others, 1)}
    return {token_id: own, **ranks}


def finite(log_prob: float) -> float:
    """Return a log-prob that JSON can carry."""
    return log_prob if math.isfinite(log_prob) else _LOWEST


def of_run(run: TokenRun) -> TokenData:
    """Return the data of new tokens."""
    return TokenData(
        token_ids=run.token_ids.tolist(),
        log_probs=None if run.log_probs is None else run.log_probs.tolist(),
        ranks=None if run.ranks is None else run.ranks.tolist(),
        top=None if run.top_n is None else run.top_n.rows(),
    )


def of_generated(request: DynamicInferenceRequest) -> TokenData:
    """Return the data of all generated tokens."""
    log_probs = request.generated_log_probs
    return TokenData(
        token_ids=request.generated_tokens,
        log_probs=None if log_probs is None else list(map(float, log_probs)),
        ranks=request.generated_ranks,
        top=request.generated_top_n_logprobs,
    )


def of_prompt(request: DynamicInferenceRequest) -> TokenData:
    """Return the data of the prompt; of its first token nothing is known."""
    ids, log_probs = request.prompt_tokens.tolist(), request.prompt_log_probs
    count = len(ids) - 1

    def shifted(values: Any) -> list[Any] | None:
        return None if values is None else [None, *list(values)[:count]]

    return TokenData(
        token_ids=ids,
        log_probs=None if log_probs is None else shifted(map(float, log_probs)),
        ranks=shifted(request.prompt_ranks),
        top=shifted(request.prompt_top_n_logprobs),
    )


def spelling(texts: Texts, as_token_ids: bool) -> Texts:
    """Return how tokens are written: their text, or `token_id:N`."""
    return (lambda token_id: f"token_id:{token_id}") if as_token_ids else texts


def completion_logprobs(
    data: TokenData, num_top: int, spell: Texts, offsets: Sequence[int]
) -> dict[str, Any]:
    """Return `logprobs` of a completion. offsets: of each token's text in the choice's text."""
    rows = data.each(num_top)
    return {
        "tokens": [spell(token_id) for token_id in data.token_ids],
        "token_logprobs": [None if lp is None else finite(lp) for _, lp, _, _ in rows],
        "top_logprobs": [_by_text(top, spell) or None for *_, top in rows],
        "text_offset": list(offsets),
    }


def _by_text(top: dict[int, float], spell: Texts) -> dict[str, float]:
    """Return log-probs by text; of tokens with one text, as parts of characters are, the first."""
    by_text: dict[str, float] = {}
    for token_id, log_prob in top.items():
        by_text.setdefault(spell(token_id), log_prob)
    return by_text


def chat_logprobs(
    data: TokenData, num_top: int, spell: Texts, bytes_of: Callable[[int], bytes]
) -> dict[str, Any]:
    """Return `logprobs` of a chat choice: one entry for each token."""

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
    """Return `logprobs` of tokens out: each by its id, under the names of old and new clients.

    `top_logprobs` of a token begin with itself, so that they are one, `num_top` or one more.
    """
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
    """Return `prompt_logprobs`: by id, with ranks, the prompt's own token first."""
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
