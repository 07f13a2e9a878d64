"""Bodies of requests, as vLLM's server takes them. Unknown keys are ignored, null is absent."""

from __future__ import annotations

from typing import Any

import msgspec

PromptField = str | list[str | int | list[int]]


class SamplingFields(msgspec.Struct, kw_only=True):
    """How tokens are drawn, and what is reported with them: fields of all doors."""

    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    # Known, and refused unless they change nothing.
    best_of: int | None = None
    suffix: str | None = None
    use_beam_search: bool | None = None
    bad_words: list[str] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class ReplyFields(SamplingFields, kw_only=True):
    """Of completions and chat: also what a reply has beside text."""

    model: str | None = None
    request_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    return_provenance: bool | None = None
    prompt_token_ids: list[int] | None = None


class CompletionBody(ReplyFields, kw_only=True):
    """POST /v1/completions. prompt_token_ids: ours, in place of `prompt`."""

    prompt: PromptField | None = None
    echo: bool | None = None
    logprobs: int | None = None


class ChatBody(ReplyFields, kw_only=True):
    """POST /v1/chat/completions. prompt_token_ids: ours, the rendered conversation, so that ids of
    earlier turns are not made anew from their text. return_tokenized_data, return_raw_text:
    Megatron's fields of the message. parallel_tool_calls: false gives the first call alone.
    include_reasoning: false leaves thoughts out; separate_reasoning: false, in the content.
    """

    messages: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_tokenized_data: bool | None = None
    return_raw_text: bool | None = None


class TokenSampling(SamplingFields, kw_only=True):
    """`sampling_params` of GenerateBody. logprobs: how many alternatives; 0: none."""

    logprobs: int | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """POST /inference/v1/generate: tokens in, tokens out."""

    token_ids: list[int]
    sampling_params: TokenSampling = msgspec.field(default_factory=TokenSampling)
    model: str | None = None
    request_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_provenance: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: of a text, or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
