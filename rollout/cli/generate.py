"""rollout generate: completes prompts of a file or of stdin, as JSON lines.

`rollout.cli.main` calls `run`. It makes an engine in this process, or a fleet if a setting needs
one. Samples go to stdout or the --output file, and the summary to stderr.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from rollout import apis, requests
from rollout.cli.models import (
    CONFIG_HELP,
    FLEET_HELP,
    LLM_HINTS,
    LLM_KINDS,
    make_llm,
    model_of,
    settings_help,
    with_model,
)
from rollout.cli.prompt_files import OutputColumns, PromptLine, read_prompts, sample_row
from rollout.cli.settings import Kinds, Parser, UsageError, fields_of, help_of, read_settings
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
_ENGINE_KINDS: Kinds = {
    (_STEP_TOKENS if name == "max_tokens" else name): kind for name, kind in LLM_KINDS.items()
}
_HINTS = LLM_HINTS | SAMPLING_HINTS
_HINTS |= {
    "max_tokens": f"num_tokens_to_generate (and {_STEP_TOKENS} for the tokens of one step)",
    **{
        name: _STEP_TOKENS
        for name in ("max_num_batched_tokens", "max_prefill_tokens", "chunked_prefill_size")
    },
    "num_return_sequences": "n",
    "logprobs": "the option --logprobs",
    "return_log_probs": "the option --logprobs",
    "prompts": "stdin or the option --input FILE",
    "prompt": "stdin or the option --input FILE",
    "input": "the option --input FILE",
    "output": "the option --output FILE",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestKeywords:
    """The arguments of LLM.submit that a command line can give.

    n: samples of each prompt.
    priority: requests of a higher number are scheduled first.
    """

    n: int = 1
    priority: int = 0


Advance = Callable[[int], None]  # takes the number of tokens of a finished prompt


def run(words: Sequence[str]) -> int:
    """Generate and write the samples of all prompts. Returns 1 if a request failed, else 0. `words`
    are the command's arguments. Raises UsageError for wrong arguments and prompts."""
    groups = (_ENGINE_KINDS, SAMPLING_KINDS, fields_of(RequestKeywords))
    given = _parser().parse(words, *groups, hints=_HINTS)
    alone = [word for word in given.settings if "=" not in word]
    if prompts := alone if any(w.startswith("model=") for w in given.settings) else alone[1:]:
        raise UsageError(
            f"{prompts[0]!r} is not a setting, and prompts are not arguments: give them on stdin, "
            f"as `echo {shlex.quote(prompts[0])} | rollout generate DIR` does, or as --input FILE"
        )
    of_llm, sampling, request = read_settings(with_model(given.settings), *groups, hints=_HINTS)
    if _STEP_TOKENS in of_llm:
        of_llm["max_tokens"] = of_llm.pop(_STEP_TOKENS)
    wanted = OutputColumns(
        token_ids=given.token_ids, log_probs=given.logprobs, versions=given.versions
    )
    params = SamplingParams(**sampling, return_log_probs=given.logprobs)
    more = RequestKeywords(**request)
    of_llm["model"] = model_of(of_llm)
    template = _chat_template_of(of_llm.get("tokenizer") or of_llm["model"])
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
        elif sys.stdin.isatty():
            print(
                "type prompts, one a line; Ctrl-D on an empty line ends them and starts generating",
                file=sys.stderr,
            )
        prompts = list(read_prompts(lines, template, source=given.input or "stdin"))
        output = sys.stdout
        if given.output:
            output = files.enter_context(_new_output(given.output, given.input))
        elif isinstance(output, io.TextIOWrapper):
            output.reconfigure(encoding="utf-8")  # JSON is UTF-8, whatever the terminal's encoding
        with make_llm(of_llm) as llm:
            if llm.tokenizer is None and any(isinstance(line.prompt, str) for line in prompts):
                raise UsageError("text prompts need a tokenizer; give tokenizer=DIR or token ids")
            return _generate(llm, prompts, params, more, wanted, output, is_json=given.json)


def _new_output(name: str, input_name: str | None) -> TextIO:
    """Open the file `name` for writing. An earlier file of that name is renamed, and stderr says
    so. Raises UsageError for the input file, for a directory, and if the file cannot be written."""
    path = Path(name)
    try:
        if path.is_dir():  # set_aside would rename it
            raise UsageError(f"--output {name} is a directory; give a file")
        if input_name and path.exists() and path.samefile(input_name):
            raise UsageError(f"--output {name} is the --input file; give another file")
        earlier = set_aside(path)
        output = path.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--output {name}: {error.strerror}; give a file that can be written"
        ) from error
    if earlier is not None:
        print(f"moved the earlier {name} to {earlier}", file=sys.stderr)
    return output


def _chat_template_of(directory: str) -> Callable[[list[Any]], str]:
    """Return a function that renders messages as a prompt with the chat template of `directory`.
    The function reads the template at its first call. It raises UsageError if there is no template
    or the template refuses the messages, and ConfigError if the template is malformed."""

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


def _parser() -> Parser:
    parser = Parser(
        "generate",
        "Complete the prompts of a file or of stdin, in UTF-8. Each line is a prompt: text, or a\n"
        "JSON object with `prompt` (text or token ids), `prompt_token_ids` or `messages`. Other\n"
        "keys of the object are copied to the output. Each sample is a line of JSON.",
    )
    parser.epilog = settings_help(
        "the requests:\n" + help_of(RequestKeywords),
        "sampling (SamplingParams):\n" + help_of(SamplingParams, without=_EXCLUDED),
        FLEET_HELP,
        CONFIG_HELP.replace("  max_tokens=none       ", f"  {_STEP_TOKENS}=none"),
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
    llm: apis.LLM,
    prompts: Sequence[PromptLine],
    params: SamplingParams,
    more: RequestKeywords,
    wanted: OutputColumns,
    output: TextIO,
    *,
    is_json: bool,
) -> int:
    """Generate all samples, and write them in the order of the prompts. Returns the exit code.
    `more` holds the number of samples and the priority. A summary goes to stderr."""
    start, counts = time.monotonic(), _Counts()
    group_ids = llm.submit(
        [line.prompt for line in prompts], params, more.n, priority=more.priority
    )
    index_of = {group_id: index for index, group_id in enumerate(group_ids)}
    # Finished groups that wait for an earlier prompt, by the index of their own prompt.
    waiting: dict[int, Sequence[requests.DynamicInferenceRequest]] = {}
    num_written = 0
    # Samples that appear on the same terminal would be written into the bar.
    is_shown = not is_json and sys.stderr.isatty() and not output.isatty()
    with _progress(len(prompts), is_shown=is_shown) as advance:
        for _ in prompts:
            for group in llm.collect(num_groups=1):
                waiting[index_of[group.group_id]] = group.requests
                advance(sum(r.num_generated_tokens for r in group.requests))
            while num_written in waiting:
                for sample, request in enumerate(waiting.pop(num_written)):
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
    """Show a progress bar on stderr if `is_shown` and the package rich is installed. The context
    manager yields a function to call for each finished prompt."""
    if not is_shown or find_spec("rich") is None:
        return nullcontext(lambda num_tokens: None)
    from rollout.cli.progress import progress_bar

    return progress_bar(num_prompts)
