"""ChatSession: answers an agent's chat completions and records them as the turns of one rollout.

`trainer_hooks.environments.agent_rollouts` makes a ChatSession for each rollout.
`trainer_hooks.environments.chat_endpoint` and the client in `trainer_hooks.environments.verifiers`
call it. A ChatSession keeps the turns in memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.chat_messages import joined_parts
from rollout.errors import ConfigError, MaxSequenceLengthOverflowError, RolloutError
from rollout.requests import DynamicInferenceRequest
from trainer_hooks.environments.conversation import Conversation
from trainer_hooks.environments.protocol import Message, ModelTurn
from trainer_hooks.producer.groups import RolloutLLM
from trainer_hooks.rollouts import Rollout

# Settings that change a token's distribution. A value is what OpenAI's and vLLM's protocols write
# for "off", or None if SamplingParams writes the same.
_FIXED: dict[str, Any] = {
    "temperature": None,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": None,
    "presence_penalty": None,
    "frequency_penalty": None,
    "repetition_penalty": None,
}
# Unsupported settings, with the values besides null that are accepted because they change nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "echo": (False,),
    "chat_template_kwargs": ({},),
}
_HEEDED = frozenset(
    {"model", "messages", "tools", "max_tokens", "max_completion_tokens", "stop", "stop_token_ids"}
)
# Settings that change neither tokens nor log-probs, and the seed, which the producer chooses.
_WITHOUT_EFFECT = frozenset(
    {
        *("seed", "logprobs", "return_token_ids", "return_tokens_as_token_ids", "user", "store"),
        *("metadata", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options"),
        *("cache_salt", "priority", "request_id", "skip_special_tokens"),
        *("spaces_between_special_tokens", "include_stop_str_in_output"),
    }
)


class ContextTooLongError(RolloutError):
    """The messages leave no room for another turn within the engine's max_sequence_length."""


class TurnFailedError(RolloutError):
    """The request of a turn was aborted or failed, so its rollout fails."""


@dataclass(slots=True, eq=False)
class _OpenConversation:
    """A conversation, and the JSON of its tools. Only one call at a time uses the conversation."""

    conversation: Conversation
    tools: str
    is_busy: bool = False


class ChatSession:
    """Answers chat completion requests by `llm`, and records each as a turn of one rollout.

    Replies are never tokenised again. A call whose messages continue an earlier call continues its
    token sequence, and any other call begins a new sequence. Calls can overlap.

    `fault`: the first error that must end the run, even if the environment's client hid it.
    """

    def __init__(
        self,
        llm: RolloutLLM,
        tokenizer: Any,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Start without turns. `tokenizer` is a transformers tokenizer with a chat template."""
        self._llm, self._tokenizer = llm, tokenizer
        self._template_options = template_options
        self._open: list[_OpenConversation] = []
        self._num_calls = 0
        self.fault: Exception | None = None
        self._has_failed_turn = False

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to `body`: a chat.completion with token ids and log-probs.

        The body's `stop` and `stop_token_ids` add to the producer's. The lower `max_tokens`
        applies. All other sampling settings are the producer's. Raises ContextTooLongError,
        TurnFailedError, ConfigError for unsupported settings, and errors of generation.
        """
        try:
            # The openai package sends the keys of extra_body at the top level.
            own = {name: value for name, value in body.items() if name != "extra_body"}
            body = {**(body.get("extra_body") or {}), **own}
            changes = self._changes(body)
            return await self._complete(body, changes)
        except ContextTooLongError:
            raise
        except TurnFailedError:
            self._has_failed_turn = True
            raise
        except Exception as error:
            self.fault = self.fault or error
            raise

    def rollout(self, **fields: Any) -> Rollout:
        """Return all turns as a Rollout with further `fields`, such as `reward`. The Rollout is
        failed if it has no turn or a call raised TurnFailedError."""
        requests: list[DynamicInferenceRequest] = []
        starts: list[int] = []
        for opened in self._open:
            if opened.conversation.requests:
                turns = opened.conversation.rollout()
                starts += [len(requests) + start for start in turns.sequence_starts]
                requests += turns.requests
        if fields.get("failure") is None and (self._has_failed_turn or not requests):
            fields["failure"] = "request_failed" if self._has_failed_turn else "no_turn"
        return Rollout(requests, sequence_starts=starts or (0,), **fields)

    def clear(self) -> None:
        """Discard all turns, before the agent starts again."""
        self._open, self._has_failed_turn = [], False

    async def _complete(self, body: Mapping[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        opened = self._idle_conversation(body.get("tools") or ())
        opened.is_busy = True
        try:
            ids = opened.conversation.prompt([_plain(message) for message in body["messages"]])
            request = await self._llm.generate(ids, **changes)
            if not request.succeeded():
                raise _error_of(request)
            turn = opened.conversation.add(request)
        finally:
            opened.is_busy = False
        self._num_calls += 1
        return {
            "id": f"chatcmpl-{self._num_calls}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": str(body.get("model", "policy")),
            "prompt_token_ids": ids,
            "choices": [_choice(request, turn, has_tools=bool(body.get("tools")))],
            "usage": {
                "prompt_tokens": len(ids),
                "completion_tokens": len(request.generated_tokens),
                "total_tokens": len(ids) + len(request.generated_tokens),
            },
        }

    def _idle_conversation(self, tools: Sequence[Mapping[str, Any]]) -> _OpenConversation:
        key = json.dumps(list(tools), sort_keys=True)
        for opened in self._open:
            if opened.tools == key and not opened.is_busy:
                return opened
        conversation = Conversation(self._tokenizer, tools, self._template_options)
        self._open.append(_OpenConversation(conversation, key))
        return self._open[-1]

    def _changes(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the SamplingParams fields that a body changes. Raises ConfigError for unsupported
        settings."""
        params = self._llm.sampling_params
        for name, off in _FIXED.items():
            given, own = body.get(name), getattr(params, name)
            if given is not None and given != own and (given != off or own):
                raise ConfigError(
                    f"the environment asks for {name}={given}, but the policy is sampled with "
                    f"{own}; remove it from the environment, or set it in the job's sampling"
                )
        for name in sorted(body.keys() - _FIXED.keys() - _HEEDED - _WITHOUT_EFFECT):
            if body[name] is not None and body[name] not in _UNSUPPORTED.get(name, ()):
                raise ConfigError(
                    f"the environment asks for {name}={body[name]!r}: not supported; remove it"
                )
        changes: dict[str, Any] = {}
        max_tokens = body.get("max_completion_tokens")
        if max_tokens is None:
            max_tokens = body.get("max_tokens")
        if max_tokens is not None:
            own_limit = params.num_tokens_to_generate
            changes["num_tokens_to_generate"] = min(max_tokens, own_limit or max_tokens)
        if body.get("stop"):
            stop = [body["stop"]] if isinstance(body["stop"], str) else body["stop"]
            changes["stop_words"] = (*(params.stop_words or ()), *stop)
        if body.get("stop_token_ids"):
            changes["stop_token_ids"] = (*(params.stop_token_ids or ()), *body["stop_token_ids"])
        return changes


def _choice(request: DynamicInferenceRequest, turn: ModelTurn, has_tools: bool) -> dict[str, Any]:
    reason = request.finish_reason
    message: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if has_tools:
        message = turn.message
        reason = "tool_calls" if turn.tool_calls and reason == "stop" else reason
    logprobs = None
    if request.generated_log_probs is not None:
        pairs = zip(request.generated_tokens, request.generated_log_probs, strict=True)
        content = [
            {"token": f"token_id:{token}", "logprob": float(logprob), "top_logprobs": []}
            for token, logprob in pairs
        ]
        logprobs = {"content": content}
    return {
        "index": 0,
        "message": message,
        "finish_reason": reason,
        "logprobs": logprobs,
        "token_ids": list(request.generated_tokens),
    }


def _plain(message: Message) -> dict[str, Any]:
    """Return the message with its text parts joined. Raises ConfigError for other parts."""
    plain = {name: value for name, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, (list, tuple)):
        try:
            plain["content"] = joined_parts([dict(part) for part in content])
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return plain


def _error_of(request: DynamicInferenceRequest) -> RolloutError:
    errors = [each.payload for each in request.events if isinstance(each.payload, Exception)]
    if errors and isinstance(errors[-1], MaxSequenceLengthOverflowError):
        return ContextTooLongError(str(errors[-1]))
    return TurnFailedError(
        f"{request.finish_reason}: {errors[-1] if errors else 'no reason given'}"
    )
