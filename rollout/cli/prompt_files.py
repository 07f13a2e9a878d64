"""Reads prompts from lines, and makes the rows of samples that `rollout generate` writes.

Used by `rollout.cli.generate`, and by `rollout.cli.bench` (`error_of`). Pure functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollout import requests
from rollout.cli.settings import UsageError
from rollout.utf8_lines import decode_line, lone_surrogate

# Keys of a JSON line that can hold its prompt.
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One prompt, as text or token ids.

    columns: items of the prompt's JSON line that are not null; empty for a line of text."""

    prompt: str | list[int]
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputColumns:
    """Which optional columns a sample's row has."""

    token_ids: bool
    log_probs: bool
    versions: bool


def read_prompts(
    lines: Iterable[bytes],
    apply_chat_template: Callable[[list[Any]], str],
    *,
    source: str,
) -> Iterator[PromptLine]:
    """Yield one prompt for each line that is not blank.

    All lines are JSON objects if the first of these lines begins with "{". Otherwise each line is
    the text of a prompt. `apply_chat_template` renders `messages` as a prompt. `source` names the
    file in error messages. Raises UsageError, naming the line, for a line that is not UTF-8 or has
    no valid prompt."""
    is_json: bool | None = None
    for number, line in enumerate(lines, start=1):
        where = f"{source}, line {number}"
        try:
            text = decode_line(line).rstrip("\r\n")
        except ValueError as error:
            raise UsageError(f"{where} {error}") from error
        if not text.strip():
            continue
        if is_json is None:
            is_json = text.lstrip().startswith("{")
        yield (
            _of_json(text, where, apply_chat_template)
            if is_json
            else PromptLine(prompt=text, columns={})
        )


def _of_json(text: str, where: str, apply_chat_template: Callable[[list[Any]], str]) -> PromptLine:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise UsageError(
            f'{where} is not JSON: {error}; give objects, as the first line begins with "{{"'
        ) from error
    given = [key for key in _PROMPT_KEYS if isinstance(row, dict) and row.get(key) is not None]
    if len(given) != 1:
        found = f"has the keys {list(row)}" if isinstance(row, dict) else f"is {row!r}"
        raise UsageError(
            f"{where} must be an object with one of {', '.join(_PROMPT_KEYS)}; it {found[:100]}"
        )
    if (broken := lone_surrogate(row)) is not None:
        raise UsageError(
            f"{where} holds half a surrogate pair, {broken[:40]!r}, which is no text; write the "
            "whole character, or leave it out"
        )
    key = given[0]
    prompt = row[key]
    if key == "messages":
        if not (isinstance(prompt, list) and all(isinstance(each, dict) for each in prompt)):
            raise UsageError(f"{where}: messages must be a list of objects")
        try:
            prompt = apply_chat_template(prompt)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error
    elif not _is_prompt(prompt):
        raise UsageError(f"{where}: {key} must be text or a list of token ids, and not empty")
    return PromptLine(prompt=prompt, columns={k: v for k, v in row.items() if v is not None})


def _is_prompt(prompt: object) -> bool:
    if isinstance(prompt, list):
        are_ids = all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)
        return are_ids and bool(prompt)
    return isinstance(prompt, str) and bool(prompt)


def sample_row(
    line: PromptLine,
    index: int,
    sample: int,
    request: requests.DynamicInferenceRequest,
    wanted: OutputColumns,
) -> dict[str, Any]:
    """Return the JSON object of one sample. `index` numbers the prompts from 0, and `sample`
    numbers the samples of the prompt from 0."""
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


def version_runs(request: requests.DynamicInferenceRequest) -> list[dict[str, int]]:
    """Return the runs of tokens [start, end) that one weights version sampled, in order. `start`
    and `end` count generated tokens from 0."""
    num_prompt = len(request.prompt_tokens)
    return [
        {"version": version, "start": max(start - num_prompt, 0), "end": end - num_prompt}
        for start, end, version in request.stamped_policy_spans()
        if end > num_prompt
    ]


def error_of(request: requests.DynamicInferenceRequest) -> str:
    """Return the message of the error that ended the request, on one line."""
    error = request.last_error
    return "the request failed" if error is None else " ".join(str(error).split())


def _generated(request: requests.DynamicInferenceRequest, ages: Any) -> list[int] | None:
    return None if ages is None else ages[len(request.prompt_tokens) :].tolist()
