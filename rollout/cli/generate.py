"""rollout generate: completes prompts of a file or of stdin, as JSON lines.

`rollout.cli.main` calls `run`. The engine is in this process, or a fleet if a setting asks for one.
Samples go to stdout or the --output file, and the summary to stderr.
"""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from rollout.apis.arguments import RolloutGroup
from rollout.apis.llm import LLM
from rollout.cli.models import MODEL_HELP, llm_kinds, make_llm, with_model
from rollout.cli.prompt_files import OutputColumns, PromptLine, read_prompts, sample_row
from rollout.cli.settings import Kinds, Parser, UsageError, fields_of, read_settings, require
from rollout.config import CONFIG_HINTS
from rollout.sampling_params import SAMPLING_HINTS, SamplingParams
from rollout.serve.errors import ApiError
from rollout.serve.openai.chat_template import ChatTemplate, load_template
from rollout.set_aside import set_aside
from rollout.text import as_tokenizer, has_tokenizer

# SamplingParams' fields that are no settings here: `seed` is InferenceConfig's, and the command's
# options choose the columns of the output.
_EXCLUDED = ("seed", "return_log_probs", "return_prompt_tokens", "streaming", "streaming_interval")
SAMPLING_KINDS: Kinds = fields_of(SamplingParams, without=_EXCLUDED)
# Name of InferenceConfig.max_tokens on this command line, as in configs of training jobs, because
# `max_tokens` of other programs limits the output.
_STEP_TOKENS = "engine.max_tokens"
_HINTS = {name: hint for name, hint in SAMPLING_HINTS.items() if name != "n"} | CONFIG_HINTS
_HINTS |= {
    "max_tokens": f"num_tokens_to_generate (and {_STEP_TOKENS} for the tokens of one step)",
    "max_num_batched_tokens": _STEP_TOKENS,
}

Advance = Callable[[int], None]  # takes the number of tokens of a finished prompt


def run(words: Sequence[str]) -> int:
    """Write the samples of all prompts. Returns 1 if a request failed, else 0. words: the command's
    arguments. Raises UsageError for wrong arguments and prompts."""
    given = _parser().parse(words)
    of_llm, sampling, more = read_settings(
        with_model(given.settings),
        _engine_kinds(),
        SAMPLING_KINDS,
        {"n": int, "priority": int},
        hints=_HINTS,
    )
    if _STEP_TOKENS in of_llm:
        of_llm["max_tokens"] = of_llm.pop(_STEP_TOKENS)
    wanted = OutputColumns(
        token_ids=given.token_ids, log_probs=given.logprobs, versions=given.versions
    )
    params = SamplingParams(**sampling, return_log_probs=given.logprobs)
    template = _chat_template_of(of_llm.get("tokenizer") or require(of_llm, "model", "DIR"))
    with ExitStack() as files:
        lines: Iterable[bytes] = sys.stdin.buffer
        if given.input:
            try:
                lines = files.enter_context(Path(given.input).open("rb"))
            except OSError as error:
                raise UsageError(
                    f"--input {given.input}: {error.strerror}; give a file of prompts, or leave "
                    "--input out to read stdin"
                ) from error
        prompts = list(read_prompts(lines, template, source=given.input or "stdin"))
        output = sys.stdout
        if given.output:
            if (earlier := set_aside(Path(given.output))) is not None:
                print(f"moved the earlier {given.output} to {earlier}", file=sys.stderr)
            output = files.enter_context(Path(given.output).open("w", encoding="utf-8"))
        elif isinstance(output, io.TextIOWrapper):
            output.reconfigure(encoding="utf-8")  # JSON is UTF-8, whatever the terminal's encoding
        with make_llm(of_llm) as llm:
            if llm.tokenizer is None and any(isinstance(line.prompt, str) for line in prompts):
                raise UsageError("text prompts need a tokenizer; give tokenizer=DIR or token ids")
            return _generate(llm, prompts, params, more, wanted, output, is_json=given.json)


def _chat_template_of(directory: str) -> Callable[[list[Any]], str]:
    """Return a function that renders messages as a prompt with the chat template of `directory`.
    The template is read at the first call. The function raises UsageError for a directory without a
    template and for messages that the template refuses, ConfigError for a malformed template."""

    @cache
    def template() -> ChatTemplate:
        tokenizer = as_tokenizer(directory) if has_tokenizer(directory) else None
        found = load_template(tokenizer, None)
        if found is None:
            raise UsageError(f"{directory} has no chat template; give prompts instead of messages")
        return found

    def apply(messages: list[Any]) -> str:
        try:
            return template().render(messages)
        except ApiError as error:
            raise UsageError(str(error)) from error

    return apply


def _engine_kinds() -> Kinds:
    """Return the settings of an LLM, with `max_tokens` under its name on this command line."""
    kinds = dict(llm_kinds())
    kinds[_STEP_TOKENS] = kinds.pop("max_tokens")
    return kinds


def _parser() -> Parser:
    parser = Parser(
        "generate",
        "Complete the prompts of a file or of stdin, in UTF-8. Each line is a prompt: text, or a\n"
        "JSON object with `prompt` (text or token ids), `prompt_token_ids` or `messages`. Other\n"
        "keys of the object are copied to the output. Each sample is a line of JSON.",
    )
    parser.epilog = (
        MODEL_HELP + "  and every field of SamplingParams, such as temperature=0.7\n"
        "  num_tokens_to_generate=N   most tokens of each sample\n"
        "  n=N                        samples of each prompt (1)\n"
        f"  {_STEP_TOKENS}=N        most tokens of one step of the engine\n"
    )
    parser.add_argument("--input", metavar="FILE", help="file of prompts (default: stdin)")
    parser.add_argument(
        "--output", metavar="FILE", help="file for the samples, as JSON lines (default: stdout)"
    )
    parser.add_argument(
        "--token-ids", action="store_true", help="add token ids of prompt and output"
    )
    parser.add_argument("--logprobs", action="store_true", help="add the log-prob of each token")
    parser.add_argument(
        "--versions", action="store_true", help="add the weights version of each token"
    )
    return parser


def _generate(
    llm: LLM,
    prompts: Sequence[PromptLine],
    params: SamplingParams,
    more: dict[str, int],
    wanted: OutputColumns,
    output: TextIO,
    *,
    is_json: bool,
) -> int:
    """Generate all samples and write each as soon as the order of the prompts allows. more: the
    settings n and priority, if given. Writes a summary to stderr. Returns the exit code."""
    start, counts = time.monotonic(), _Counts()
    n = more.get("n", 1)
    group_ids = llm.submit(
        [line.prompt for line in prompts], params, n, priority=more.get("priority", 0)
    )
    index_of = {group_id: index for index, group_id in enumerate(group_ids)}
    waiting: dict[int, RolloutGroup] = {}
    num_written = 0
    with _progress(len(prompts), is_shown=not is_json and sys.stderr.isatty()) as advance:
        for _ in prompts:
            for group in llm.collect(num_groups=1):
                waiting[index_of[group.group_id]] = group
                advance(sum(r.num_generated_tokens for r in group.requests))
            while num_written in waiting:
                group = waiting.pop(num_written)
                for sample, request in enumerate(group.requests):
                    row = sample_row(prompts[num_written], num_written, sample, request, wanted)
                    print(json.dumps(row, ensure_ascii=False), file=output)
                    counts.add(row)
                output.flush()
                num_written += 1
    summary = dataclasses.asdict(counts) | {"seed": llm.seed}
    summary["seconds"] = round(time.monotonic() - start, 3)
    if is_json:
        print(json.dumps(summary), file=sys.stderr)
    elif counts.num_failed:
        print(f"rollout: {counts.num_failed} of {counts.num_samples} failed", file=sys.stderr)
    return 1 if counts.num_failed else 0


@dataclasses.dataclass(slots=True)
class _Counts:
    num_samples: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0

    def add(self, row: dict[str, Any]) -> None:
        self.num_samples += 1
        self.num_failed += "error" in row
        self.num_prompt_tokens += row["num_prompt_tokens"]
        self.num_generated_tokens += row["num_generated_tokens"]


def _progress(num_prompts: int, *, is_shown: bool) -> AbstractContextManager[Advance]:
    """Show a progress bar on stderr, if `is_shown` and the package rich is installed. The context
    manager yields a function to call for each finished prompt."""
    if not is_shown or find_spec("rich") is None:
        return nullcontext(lambda num_tokens: None)
    from rollout.cli.progress import progress_bar

    return progress_bar(num_prompts)
