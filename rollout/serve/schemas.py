"""Request bodies of the openai protocol, with the fields that clients of vLLM and SGLang add.

`rollout.serve.openai` and `rollout.serve.sampling` read these structs. `rollout.serve.sglang`
reuses SamplingFields and the annotations. The annotation of a field without effect says why.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from rollout.serve.fields import Fields, neutral, refused

PromptField = str | list[str | int | list[int]]

# ---- annotations of fields that several bodies have

Grammar = Annotated[Any, refused("output is not constrained; check it, and sample again")]
GrammarDetail = Annotated[Any, neutral("it is a detail of grammars, which are refused")]
Beam = Annotated[Any, refused("there is no beam search; sample with n")]
BeamDetail = Annotated[Any, neutral("it is a detail of beam search, which is refused")]
LogitProcessor = Annotated[
    Any, refused("no code of a request runs here; use logit_bias or allowed_token_ids")
]
OfTokenIds = Annotated[
    Any, refused("log-probs of chosen ids are not computed; ask for the most likely ones")
]
Watermark = Annotated[Any, refused("tokens are drawn without watermarks")]
Repeats = Annotated[Any, refused("repeats do not end a request; use stop, or frequency_penalty")]
ThinkingBudget = Annotated[Any, refused("thoughts are not counted; use max_tokens", -1)]
Adapter = Annotated[Any, refused("there are no LoRA adapters; push merged weights")]
Embeddings = Annotated[Any, refused("prompts are texts or token ids; send those")]
Media = Annotated[Any, refused("the model reads text alone; leave images, audio and video out")]
MediaDetail = Annotated[Any, neutral("it is a detail of media, which are refused")]
Transfer = Annotated[
    Any, refused("prefill and decode run in one engine; send the request as a whole")
]
Extension = Annotated[Any, refused("no extension of the server reads it; leave it out")]
Session = Annotated[Any, refused("no session keeps a prompt; send the prompt as a whole")]
Report = Annotated[Any, refused("it is not reported; leave the field out")]
Experts = Annotated[
    Any, refused("expert ids are in requests of LLM.generate with record_routing, not in replies")
]
ExpertsDetail = Annotated[Any, neutral("it cuts a list of expert ids, which is not reported")]
Offsets = Annotated[Any, neutral("only vLLM's routes that render prompts read it")]
Placement = Annotated[Any, neutral("it says where a request runs, which changes no token")]
Label = Annotated[Any, neutral("it labels the request for logs and caches of its sender")]
Spaces = Annotated[Any, neutral("the tokenizer's decoder decides about spaces")]
OfTexts = Annotated[Any, neutral("it is a detail of texts, and the reply has ids")]
TokensOut = Annotated[Any, refused("ask for ids with return_token_ids")]


class SamplingFields(Fields, kw_only=True):
    """Fields of all protocols that control sampling. no_stop_trim is SGLang's name of
    include_stop_str_in_output."""

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
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    stream_interval: int | None = None

    best_of: Annotated[Any, refused("all samples are returned; set n", 1)] = None
    bad_words: Annotated[Any, refused("words are not forbidden; use logit_bias of their ids")] = (
        None
    )
    guided_choice: Grammar = None
    guided_decoding_backend: GrammarDetail = None
    guided_grammar: Grammar = None
    guided_json: Grammar = None
    guided_regex: Grammar = None
    guided_whitespace_pattern: GrammarDetail = None
    length_penalty: BeamDetail = None
    logits_processors: LogitProcessor = None
    logprob_token_ids: OfTokenIds = None
    repetition_detection: Repeats = None
    response_format: Annotated[
        Any, refused("output is not constrained; ask in the prompt", {"type": "text"})
    ] = None
    routed_experts_prompt_start: ExpertsDetail = None
    spaces_between_special_tokens: Spaces = None
    structured_outputs: Grammar = None
    suffix: Annotated[Any, refused("nothing is filled in; end the prompt where text begins")] = None
    thinking_token_budget: ThinkingBudget = None
    use_beam_search: Beam = None
    watermarking: Watermark = None


class StreamOptions(Fields, kw_only=True):
    """Options of a stream. With include_usage, a last chunk has the usage of all samples. If
    continuous_usage_stats is set, too, each chunk has its sample's usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    include_obfuscation: Annotated[Any, refused("chunks are not padded; use TLS in front")] = None


class ReplyFields(SamplingFields, kw_only=True):
    """Fields that completions and chats add to SamplingFields. rid is SGLang's name of request_id.
    extra_key is a second cache_salt."""

    model: str | None = None
    request_id: str | None = None
    rid: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    return_provenance: bool | None = None
    prompt_token_ids: list[int] | None = None

    bootstrap_host: Transfer = None
    bootstrap_port: Transfer = None
    bootstrap_room: Transfer = None
    custom_labels: Label = None
    custom_logit_processor: LogitProcessor = None
    custom_params: LogitProcessor = None
    data_parallel_rank: Placement = None
    disagg_prefill_dp_rank: Placement = None
    ebnf: Grammar = None
    ec_transfer_params: Transfer = None
    images_config: MediaDetail = None
    json_schema: Grammar = None
    kv_transfer_params: Transfer = None
    lora_path: Adapter = None
    metadata: Label = None
    mm_payload: Offsets = None
    mm_processor_kwargs: MediaDetail = None
    prompt_cache_key: Label = None
    prompt_cache_options: Label = None
    prompt_cache_retention: Label = None
    prompt_embeds: Embeddings = None
    regex: Grammar = None
    return_cached_tokens_details: Annotated[
        Any, refused("usage.prompt_tokens_details has the number alone")
    ] = None
    return_hidden_states: Report = None
    return_mm_kwargs: Offsets = None
    return_routed_experts: Experts = None
    return_spec_tokens_details: Report = None
    return_token_offsets: Offsets = None
    routed_dp_rank: Placement = None
    routed_experts_start_len: ExpertsDetail = None
    safety_identifier: Label = None
    service_tier: Annotated[
        Any, refused("there is one tier; order requests by priority", "auto", "default")
    ] = None
    session_id: Placement = None
    session_params: Session = None
    stop_regex: Annotated[Any, refused("stops are strings or ids: use stop, stop_token_ids")] = None
    store: Annotated[Any, refused("replies are not stored; keep them")] = None
    user: Label = None
    vllm_xargs: Extension = None
    watermark: Watermark = None


class CompletionBody(ReplyFields, kw_only=True):
    """Body of POST /v1/completions. prompt_token_ids has token ids in place of `prompt`."""

    prompt: PromptField | None = None
    echo: bool | None = None
    logprobs: int | None = None


class ChatBody(ReplyFields, kw_only=True):
    """Body of POST /v1/chat/completions.

    prompt_token_ids: token ids of the whole rendered conversation, in place of `messages`. Earlier
        turns keep their sampled ids in this way.
    input_ids: SGLang's name of prompt_token_ids.
    return_tokenized_data, return_raw_text: Megatron's fields, which add ids and raw text to the
        message.
    parallel_tool_calls: false returns only the first call.
    include_reasoning: false omits thoughts.
    separate_reasoning: false leaves thoughts in the content.
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
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | float | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    input_ids: list[int] | None = None
    return_tokenized_data: bool | None = None
    return_raw_text: bool | None = None

    audio: Media = None
    echo: Annotated[Any, refused("a reply has new text alone; put the old in front of it")] = None
    function_call: Annotated[Any, refused("use tool_choice", "auto", "none")] = None
    functions: Annotated[Any, refused("use tools")] = None
    max_dynamic_patch: MediaDetail = None
    media_io_kwargs: MediaDetail = None
    min_dynamic_patch: MediaDetail = None
    modalities: Annotated[Any, refused("replies are text", ["text"])] = None
    moderation: Annotated[Any, refused("replies are not moderated; do so yourself")] = None
    prediction: Annotated[Any, neutral("it can make a reply faster, and never another one")] = None
    reasoning: Annotated[Any, refused("use reasoning_effort, or chat_template_kwargs")] = None
    return_flat_raw_output_top_logprobs: Report = None
    return_flat_raw_top_logprobs_b64: Report = None
    return_input_ids_in_sglext: TokensOut = None
    return_meta_info: Annotated[Any, refused("POST /generate replies with meta_info")] = None
    return_output_ids_in_sglext: TokensOut = None
    return_prompt_text: Annotated[
        Any, refused("ask for ids with return_token_ids, and /detokenize them")
    ] = None
    return_prompt_token_ids: TokensOut = None
    return_sampling_mask: Report = None
    sampling_logprobs_mode: Annotated[
        Any, neutral("it is a detail of return_sampling_mask, which is refused")
    ] = None
    stream_reasoning: Annotated[Any, refused("thoughts are streamed as they come", True)] = None
    task: Annotated[Any, refused("write the task's token into the conversation")] = None
    thinking: Annotated[Any, refused("use chat_template_kwargs")] = None
    use_audio_in_video: MediaDetail = None
    verbosity: Annotated[Any, refused("ask for a length in the conversation", "medium")] = None
    video_config: MediaDetail = None
    web_search_options: Annotated[Any, refused("nothing is searched; give results as text")] = None


class TokenSampling(SamplingFields, kw_only=True):
    """The object `sampling_params` in a GenerateBody. logprobs is the number of alternatives. 0
    returns only the token's own log-prob."""

    logprobs: int | None = None

    detokenize: OfTexts = None
    extra_args: Extension = None
    flat_logprobs: Annotated[Any, neutral("vLLM's own layout in memory; JSON is the same")] = None
    include_stop_str_in_output: OfTexts = None
    no_stop_trim: OfTexts = None
    output_kind: Annotated[Any, neutral("`stream` says whether a reply comes in parts")] = None
    output_text_buffer_length: Annotated[Any, neutral("vLLM's own: the reply has ids")] = None
    prompt_logprob_start: Annotated[
        Any, refused("prompt_logprobs begin with the prompt; drop the first", 0)
    ] = None
    prompt_logprob_token_ids: OfTokenIds = None
    skip_clone: Annotated[Any, neutral("vLLM's own: whether it copies this object")] = None
    skip_reading_prefix_cache: Annotated[
        Any, refused("give the request a cache_salt of its own")
    ] = None
    skip_special_tokens: OfTexts = None
    trace_decode_token_ids: Report = None


class GenerateBody(Fields, kw_only=True):
    """Body of POST /inference/v1/generate, which takes and returns token ids."""

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

    content_parts: Media = None
    ec_transfer_params: Transfer = None
    features: Media = None
    kv_transfer_params: Transfer = None
    output_mode: Annotated[Any, refused("ids come out; POST /detokenize them", "tokens")] = None
    parse_context: Annotated[
        Any, neutral("it is a detail of output_mode='derender', which is refused")
    ] = None
    prompt_embeds: Embeddings = None
    reasoning_ended: GrammarDetail = None
    reasoning_parser_kwargs: GrammarDetail = None
    token_offsets: Annotated[Any, neutral("it says where in a text the given ids were")] = None


class TokenizeBody(Fields, kw_only=True):
    """Body of POST /tokenize, with a text in `prompt` or a chat in `messages`."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | float | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    media_io_kwargs: MediaDetail = None
    mm_processor_kwargs: MediaDetail = None
    tool_choice: Annotated[
        Any, refused("the template gets all tools; leave out those it should not", "auto", "none")
    ] = None


class DetokenizeBody(Fields, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None

    skip_special_tokens: Annotated[
        Any, refused("special tokens are shown; leave their ids out", False)
    ] = None
