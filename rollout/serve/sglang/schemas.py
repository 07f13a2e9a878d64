"""The body of SGLang's POST /generate, with the fields that SGLang's clients send.

`rollout.serve.sglang.generate` reads it. The annotation of a field without effect says why.
"""

from __future__ import annotations

from typing import Annotated, Any

from rollout.serve.fields import Fields, neutral, refused
from rollout.serve.schemas import (
    Adapter,
    Embeddings,
    Experts,
    ExpertsDetail,
    Grammar,
    GrammarDetail,
    Label,
    LogitProcessor,
    Media,
    MediaDetail,
    OfTokenIds,
    Placement,
    Report,
    Session,
    Spaces,
    ThinkingBudget,
    Transfer,
    Watermark,
)

Internal = Annotated[Any, refused("only SGLang's own processes send it; leave it out")]
InternalDetail = Annotated[Any, neutral("only SGLang's own processes read it")]
Pooling = Annotated[Any, refused("no scores of items are computed; ask for log-probs")]
TopP = Annotated[Any, refused("the ids that top_p keeps are not reported; train with top_p=1")]
FlatRows = Annotated[Any, refused("log-probs come as rows of [log-prob, id, text]")]


class SglangSampling(Fields, kw_only=True):
    """`sampling_params` of GenerateBody, under SGLang's names. A null max_new_tokens allows as many
    tokens as fit into the context."""

    max_new_tokens: int | None = 128
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None
    logit_bias: dict[int, float] | None = None
    n: int | None = None
    stream_interval: int | None = None

    beam_width: Annotated[Any, refused("there is no beam search; sample with n", 1)] = None
    custom_params: LogitProcessor = None
    ebnf: Grammar = None
    ebnf_full_assistant: GrammarDetail = None
    is_normalized: Internal = None
    json_schema: Grammar = None
    regex: Grammar = None
    return_top_p_token_ids: TopP = None
    spaces_between_special_tokens: Spaces = None
    stop_regex: Annotated[Any, refused("stops are strings or ids: use stop, stop_token_ids")] = None
    stop_regex_max_len: InternalDetail = None
    stop_regex_strs: Internal = None
    stop_str_max_len: InternalDetail = None
    stop_strs: Internal = None
    structural_tag: Grammar = None
    watermark: Watermark = None


class GenerateBody(Fields, kw_only=True):
    """Body of POST /generate, with one prompt or a list of prompts. For a list, `sampling_params`
    and `rid` can be lists with one entry for each prompt.

    rid: name of the request, for aborts.
    cache_salt, extra_key: requests share cached prefixes only if both are equal.
    priority: a request with a higher number runs first.
    """

    input_ids: list[int | list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: SglangSampling | list[SglangSampling] | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None

    audio_data: Media = None
    background: Annotated[Any, refused("the reply comes on this connection; wait for it")] = None
    bootstrap_host: Transfer = None
    bootstrap_pair_key: Transfer = None
    bootstrap_port: Transfer = None
    bootstrap_room: Transfer = None
    conversation_id: Label = None
    custom_labels: Label = None
    custom_logit_processor: LogitProcessor = None
    data_parallel_rank: Placement = None
    decode_tp_size: Transfer = None
    disagg_prefill_dp_rank: Placement = None
    encoder_urls: Internal = None
    external_trace_header: Label = None
    http_worker_ipc: Internal = None
    image_data: Media = None
    image_max_dynamic_patch: MediaDetail = None
    images_config: MediaDetail = None
    input_embeds: Embeddings = None
    kv_hints: Annotated[Any, neutral("it says where KV may be stored, which changes no token")] = (
        None
    )
    log_metrics: Annotated[Any, neutral("all requests are counted; none is logged")] = None
    lora_id: Adapter = None
    lora_path: Adapter = None
    max_dynamic_patch: MediaDetail = None
    max_thinking_tokens: ThinkingBudget = None
    min_dynamic_patch: MediaDetail = None
    mm_content_hashes: MediaDetail = None
    mm_hashes: MediaDetail = None
    mm_processor_kwargs: MediaDetail = None
    modalities: MediaDetail = None
    multi_item_delimiter_indices: Pooling = None
    need_wait_for_mm_inputs: Internal = None
    no_logs: Annotated[Any, refused("the last samples are kept for the server's page")] = None
    num_items_assigned: Internal = None
    positional_embed_overrides: Embeddings = None
    received_time: InternalDetail = None
    require_reasoning: Grammar = None
    return_bytes: Report = None
    return_entropy: Report = None
    return_flat_raw_output_top_logprobs: FlatRows = None
    return_flat_raw_top_logprobs: FlatRows = None
    return_flat_raw_top_logprobs_b64: FlatRows = None
    return_hidden_states: Report = None
    return_indexer_topk: Report = None
    return_prompt_token_ids: Annotated[
        Any, refused("set return_logprob and logprob_start_len=0, whose rows have them")
    ] = None
    return_routed_experts: Experts = None
    return_sampling_mask: TopP = None
    return_top_p_token_ids: TopP = None
    routed_dp_rank: Placement = None
    routed_experts_start_len: ExpertsDetail = None
    routing_key: Placement = None
    sampling_logprobs_mode: Annotated[
        Any, neutral("it is a detail of return_sampling_mask, which is refused")
    ] = None
    session_id: Placement = None
    session_params: Session = None
    token_ids_logprob: OfTokenIds = None
    token_indices_to_pool: Pooling = None
    use_audio_in_video: MediaDetail = None
    video_config: MediaDetail = None
    video_data: Media = None
    video_max_dynamic_patch: MediaDetail = None
    watermark: Watermark = None
