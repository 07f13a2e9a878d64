"""ChatTemplate: renders a conversation as text, by transformers.

`rollout.serve.server` and `rollout.cli.serve` load the template. `rollout.serve.openai.model`
renders chats for /v1/chat/completions and /tokenize, `rollout.cli.generate` for the command line.
`load_template` reads files.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from rollout.chat_messages import plain_message
from rollout.errors import ConfigError
from rollout.serve.errors import ApiError
from rollout.text import INSTALL_TEXT, HFTokenizer, RenderedText, Tokenizer

_NUM_CACHED = 16  # templates of the model and of requests whose `reads_parts` is kept
_PROBE = "rollout-probe"
_NO_SPECIAL_TOKENS = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
_MAX_REASON = 500  # characters; some errors of transformers quote the whole conversation

Message = Mapping[str, Any]


class ChatTemplate:
    """The chat templates of a tokenizer, or one given template in their place."""

    def __init__(self, tokenizer: Tokenizer | None, source: str | None = None) -> None:
        """Wrap a tokenizer. `source` replaces the tokenizer's templates. Templates get no special
        tokens if `tokenizer` is not an HFTokenizer. Raises ConfigError if transformers is not
        installed."""
        if isinstance(tokenizer, HFTokenizer):
            self._tokenizer = tokenizer.hf_tokenizer
        else:
            self._tokenizer = _without_vocabulary()
        self._given = source

    @property
    def source(self) -> str | None:
        """Return the text of the template for conversations without tools, or None if there is
        none."""
        if self._given is not None:
            return self._given
        templates = self._tokenizer.chat_template
        found = templates.get("default") if isinstance(templates, dict) else templates
        return found or None

    @property
    def special_tokens(self) -> dict[str, str]:
        """Return the tokenizer's special tokens by role, such as {"eos_token": "</s>"}."""
        return {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()}

    @property
    def all_sources(self) -> str:
        """Return the given template, or all templates of the tokenizer joined by line breaks."""
        templates = self._given or self._tokenizer.chat_template or ""
        return "\n".join(templates.values()) if isinstance(templates, dict) else str(templates)

    def source_for(self, tools: Sequence[Any] | None, template: str | None = None) -> str:
        """Return the text of the template for a conversation with `tools`. `template` is the text
        or name of another template. Raises ApiError if there is no template for the
        conversation."""
        try:
            return str(self._tokenizer.get_chat_template(template or self._given, tools or None))
        except ValueError as fault:  # several templates without a default
            raise ApiError(400, f"{fault}"[:_MAX_REASON], param="chat_template") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedText:
        """Return a conversation as text, as the tokenizer's `apply_chat_template` renders it.

        template: text or name of another template.
        variables: further variables of the template.

        Messages are normalized by `plain_message` first. Raises ApiError for a conversation or
        variables that cannot be rendered.
        """
        if continue_final_message and add_generation_prompt:
            raise ApiError(
                400,
                "continue_final_message=true needs add_generation_prompt=false",
                param="messages",
            )
        tools = [dict(tool) for tool in tools] if tools else None
        source = self.source_for(tools, template)
        try:
            return RenderedText(
                self._tokenizer.apply_chat_template(
                    [_plain(message, keeps_parts=reads_parts(source)) for message in messages],
                    tools=tools,
                    chat_template=source,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tokenize=False,
                    **_checked(variables or {}),
                )
            )
        except ApiError:
            raise
        except Exception as fault:  # a template may raise anything
            reason = str(fault)[:_MAX_REASON]
            raise ApiError(400, f"the chat template failed: {reason}", param="messages") from None


def load_template(tokenizer: Tokenizer | None, given: str | None) -> ChatTemplate | None:
    """Load the chat template of a server. Return None if there is none. `given` is a file, a
    template's text, or the name of a template of the tokenizer. If it is None, the tokenizer's
    templates are used. Raises ConfigError for a malformed template or a missing file."""
    own = tokenizer.hf_tokenizer.chat_template if isinstance(tokenizer, HFTokenizer) else None
    named = own if isinstance(own, dict) else {}
    source = given
    if given in named:
        source = named[given]
    elif given is not None and "{" not in given:
        if not Path(given).is_file():
            raise ConfigError(
                f"chat_template={given!r} is neither a file nor a template; give one of them"
            )
        source = Path(given).read_text(encoding="utf-8")
    sources = [source] if source is not None else list(named.values()) if named else [own]
    for each in filter(None, sources):
        _check_syntax(each)
    return ChatTemplate(tokenizer, source) if any(sources) else None


def _check_syntax(source: str) -> None:
    """Raise ConfigError for a template with a syntax error or if a package is missing or too
    old."""
    try:
        import jinja2

        _render_probe(source, _PROBE)
    except ImportError as fault:
        raise ConfigError(f"chat templates need more packages ({fault}): {INSTALL_TEXT}") from fault
    except ConfigError:  # transformers is missing
        raise
    except jinja2.TemplateSyntaxError as fault:
        raise ConfigError(f"the chat template cannot be read: {fault}") from fault
    except Exception:  # the template refuses only the probe's conversation
        return


@lru_cache(_NUM_CACHED)
def reads_parts(source: str) -> bool:
    """Return whether a template can read message content that is a list of parts."""
    try:
        text = _render_probe(source, [{"type": "text", "text": _PROBE}])
    except Exception:  # a template may raise anything
        return False
    return _PROBE in text and re.search(r"""['"]type['"]:""", text) is None


def _render_probe(source: str, content: Any) -> str:
    message = {"role": "user", "content": content}
    return str(
        _without_vocabulary().apply_chat_template(
            [message], chat_template=source, tokenize=False, **_NO_SPECIAL_TOKENS
        )
    )


def _without_vocabulary() -> Any:
    """Return a Hugging Face tokenizer that can only render templates. Raises ConfigError if
    transformers is missing."""
    try:
        from transformers import PreTrainedTokenizerBase
    except ImportError as error:
        raise ConfigError(f"chat templates need transformers: {INSTALL_TEXT}") from error
    return PreTrainedTokenizerBase()


@cache
def _options_of_transformers() -> frozenset[str]:
    """Return the option names of apply_chat_template, which template variables must not have."""
    from transformers import PreTrainedTokenizerBase

    options = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset((*options, "messages")) - {"documents"}


def _checked(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables as a dict. Raises ApiError for an option name of apply_chat_template."""
    for name in variables:
        if name in _options_of_transformers():
            raise ApiError(
                400,
                f"chat_template_kwargs cannot set {name!r}, which is not a variable of templates; "
                "leave it out",
                param="chat_template_kwargs",
            )
    return dict(variables)


def _plain(message: Message, *, keeps_parts: bool) -> dict[str, Any]:
    """Return a message as templates read it. Raises ApiError for a malformed message."""
    try:
        return plain_message(message, reads_parts=keeps_parts)
    except ValueError as fault:
        raise ApiError(400, str(fault), param="messages") from None
