"""Prompts from text lines or JSON lines, and generated samples as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.cli.settings import UsageError
from rollout.requests.dynamic_request import DynamicInferenceRequest

# One of these says what the prompt of a JSON line is.
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One prompt: text or token ids. `columns` are what else its JSON line holds."""

    prompt: str | list[int]
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputColumns:
    """What a sample brings besides its text."""

    token_ids: bool
    log_probs: bool
    versions: bool


def read_prompts(
    lines: Iterable[str],
    apply_chat_template: Callable[[list[Any]], str],
    *,
    source: str,
) -> Iterator[PromptLine]:
    """Yield the prompts of `lines`: of JSON lines if the first one begins with "{", else of text.

    Blank lines are left out. `source` is what errors call the lines. Raises UsageError, which names
    the line.
    """
    is_json: bool | None = None
    for number, line in enumerate(lines, start=1):
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        if is_json is None:
            is_json = text.lstrip().startswith("{")
        yield (
            _of_json(text, f"{source}, line {number}", apply_chat_template)
            if is_json
            else PromptLine(prompt=text, columns={})
        )


def _of_json(text: str, where: str, apply_chat_template: Callable[[list[Any]], str]) -> PromptLine:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise UsageError(
            f'{where} is no JSON: {error}; lines are objects, as the first begins with "{{"'
        ) from error
    given = [key for key in _PROMPT_KEYS if isinstance(row, dict) and row.get(key) is not None]
    if len(given) != 1:
        raise UsageError(f"{where} must be an object with one of {', '.join(_PROMPT_KEYS)}")
    key = given[0]
    prompt = row[key]
    if key == "messages":
        if not (isinstance(prompt, list) and all(isinstance(each, dict) for each in prompt)):
            raise UsageError(f"{where}: messages must be a list of objects")
        prompt = apply_chat_template(prompt)
    elif not _is_prompt(prompt):
        raise UsageError(f"{where}: {key} must be text or a list of token ids")
    return PromptLine(prompt=prompt, columns={k: v for k, v in row.items() if v is not None})


def _is_prompt(prompt: object) -> bool:
    if isinstance(prompt, list):
        return all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)
    return isinstance(prompt, str)


def sample_row(
    line: PromptLine,
    index: int,
    sample: int,
    request: DynamicInferenceRequest,
    wanted: OutputColumns,
) -> dict[str, Any]:
    """Return the JSON object of one sample. `index` is that of its prompt."""
    row: dict[str, Any] = {
        "prompt": line.prompt,
        **line.columns,
        "index": index,
        "sample": sample,
        "text": request.generated_text,
        "finish_reason": request.finish_reason,
        "num_prompt_tokens": len(request.prompt_tokens),
        "num_generated_tokens": request.num_generated_tokens,
        "weights_version": request.completed_at_version,
    }
    if request.failed():
        row["error"] = error_of(request)
    if wanted.token_ids:
        row["prompt_token_ids"] = request.prompt_tokens.tolist()
        row["token_ids"] = list(request.generated_tokens)
    if wanted.log_probs and request.generated_log_probs is not None:
        row["log_probs"] = [float(value) for value in request.generated_log_probs]
    if wanted.versions:
        row["weight_versions"] = version_runs(request)
        row["policy_staleness"] = _generated(request, request.policy_staleness)
        row["kv_cache_staleness"] = _generated(request, request.kv_cache_staleness)
    return row


def version_runs(request: DynamicInferenceRequest) -> list[dict[str, int]]:
    """Return which version sampled which generated tokens: [start, end) per run."""
    num_prompt = len(request.prompt_tokens)
    return [
        {"version": version, "start": max(start - num_prompt, 0), "end": end - num_prompt}
        for start, end, version in request.stamped_policy_spans()
        if end > num_prompt
    ]


def error_of(request: DynamicInferenceRequest) -> str:
    """Return the message of the error that ended the request."""
    error = request.last_error
    return "the request failed" if error is None else " ".join(str(error).split())


def _generated(request: DynamicInferenceRequest, ages: Any) -> list[int] | None:
    return None if ages is None else ages[len(request.prompt_tokens) :].tolist()
