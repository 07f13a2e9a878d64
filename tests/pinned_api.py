"""The public API that users rely on: names, parameters and fields. More may be added, none may go.

A parameter or field is pinned as `name` or, with its default, as `name=value`.
"""

from __future__ import annotations

# Module -> the names that can be imported from it.
NAMES = {
    "rollout": """
        SamplingParams InferenceConfig KVCacheManagementMode PrefixCachingEvictionPolicy
        PrefixCachingCoordinatorPolicy MambaInferenceStateConfig
        Status InferenceRequest VLMInferenceRequest DynamicInferenceRequest
        DynamicInferenceEventType DynamicInferenceEvent DynamicInferenceRequestRecord
        compute_block_hashes_batched serialize_tensor deserialize_tensor
        RolloutError ConfigError EngineStateError WeightUpdateError ProtocolError EventPayloadError
        RequestAbortedError ContextOverflowError RequestOverflowError TokenOverflowError
        BlockOverflowError TokenLimitClamped MaxSequenceLengthOverflowError
        CoordinatorLostError ClientStateError LockstepError
        DynamicInferenceEngine EngineState EngineStats SuspendReport ResumeReport
        WeightUpdateReport LLM AsyncLLM RolloutGroup
        DataParallelInferenceCoordinator InferenceClient ServeConfig
    """,
    "rollout.apis": "LLM AsyncLLM ThreadedLLM MegatronLLM MegatronAsyncLLM",
    "trainer_hooks": """
        InProcessWeightSync SharedMemoryWeightSync generation_phase group_advantages gae_advantages
        policy_loss PolicyLossConfig collate_rollouts RolloutBatch AsyncRolloutProducer
        MetricsLogger
    """,
}

# Callable -> its first parameters, in this order.
PARAMETERS = {
    "rollout.ContextOverflowError": "request_id message=None is_transient=True",
    "rollout.DynamicInferenceEngine.from_model": (
        "model inference_config=None tokenizer=None weights_version=0"
    ),
    "rollout.DynamicInferenceEngine.add_request": (
        "self prompt_tokens sampling_params request_id=None priority=0"
    ),
    "rollout.DynamicInferenceEngine.add_group": (
        "self prompt_tokens list_of_sampling_params request_ids=None priority=0"
    ),
    "rollout.DynamicInferenceEngine.step": "self",
    "rollout.DynamicInferenceEngine.has_unfinished_requests": "self",
    "rollout.DynamicInferenceEngine.get_record": "self request_id",
    "rollout.DynamicInferenceEngine.abort_request": "self request_id",
    "rollout.DynamicInferenceEngine.set_generation_epoch": "self version",
    "rollout.DynamicInferenceEngine.pause": "self",
    "rollout.DynamicInferenceEngine.unpause": "self",
    "rollout.DynamicInferenceEngine.suspend": (
        "self mode=None release=('kv_cache',) discard_weights=False"
    ),
    "rollout.DynamicInferenceEngine.resume": "self only=None",
    "rollout.DynamicInferenceEngine.update_weights": (
        "self named_tensors version=None in_flight=False"
    ),
    "rollout.DynamicInferenceEngine.weights_checksum": "self",
    "rollout.DynamicInferenceEngine.stats": "self",
    "rollout.DynamicInferenceEngine.kv_data_ptrs": "self",
    "rollout.LLM": (
        "model tokenizer=None inference_config=None use_coordinator=False weights_version=0"
    ),
    "rollout.LLM.generate": "self prompts sampling_params=None n=1 progress=False",
    "rollout.LLM.submit": "self prompts sampling_params=None n=1",
    "rollout.LLM.collect": "self num_groups=None timeout_s=None",
    "rollout.LLM.pause": "self",
    "rollout.LLM.unpause": "self",
    "rollout.LLM.suspend": "self mode=None release=('kv_cache',) discard_weights=False",
    "rollout.LLM.resume": "self only=None",
    "rollout.LLM.update_weights": "self named_tensors version=None in_flight=False",
    "rollout.LLM.shutdown": "self",
    "rollout.AsyncLLM": "model tokenizer=None inference_config=None",
    "rollout.AsyncLLM.generate": "self prompts sampling_params=None n=1",
    "rollout.AsyncLLM.connect": "address",
    "rollout.AsyncLLM.serve": "self config=None blocking=True",
    "rollout.AsyncLLM.stop_serving": "self",
    "trainer_hooks.collate_rollouts": "requests rewards train_version",
}

# Callable -> keywords that it takes, in any order.
KEYWORDS = {
    "rollout.AsyncLLM": """
        use_coordinator=True data_parallel_size=1 spawn=None coordinator_host=None
        coordinator_port=None max_engine_restarts=3 weights_version=0
    """,
    "rollout.ServeConfig": """
        host='127.0.0.1' port=8000 api_key=None admin_key=None
        protocols=('openai','vllm','sglang')
    """,
    "rollout.InferenceConfig": """
        device='auto' dtype='auto' memory_kind='auto' seed=None num_threads=None
        max_kv_staleness_versions=None prefix_reuse_across_versions=False deterministic=False
        reject_non_finite_weights=True tensor_parallel_size=1
    """,
    "rollout.SamplingParams": """
        temperature=1.0 top_k=0 top_p=0.0 min_p=0.0 num_tokens_to_generate=None
        num_tokens_total=None termination_id=None stop_words=None ignore_eos=False seed=None
        return_log_probs=False skip_prompt_log_probs=True top_n_logprobs=0 logprobs_mode='raw'
        add_BOS=False detokenize_stop_sequence=False return_prompt_tokens=True streaming=False
        streaming_interval=1
    """,
    "trainer_hooks.generation_phase": (
        "llm weight_sync=None named_parameters=None version=None mode=None"
    ),
    "trainer_hooks.group_advantages": "rewards_PG normalize='std'",
    "trainer_hooks.policy_loss": """
        logprobs_BT behaviour_logprobs_BT advantages_BT mask_BT config reference_logprobs_BT=None
        proximal_logprobs_BT=None policy_lag_BT=None kv_lag_BT=None aggregation_denominator=None
    """,
    "trainer_hooks.collate_rollouts": "requests rewards train_version temperature=1.0",
    "trainer_hooks.AsyncRolloutProducer": """
        llm prompts reward_fn group_size batch_groups max_staleness_versions rollout_fn=None
    """,
    "trainer_hooks.MetricsLogger": "jsonl wandb console",
    "trainer_hooks.InProcessWeightSync.push": "self named_parameters version=None",
    "trainer_hooks.InProcessWeightSync.apush": "self named_parameters version=None",
}

# Class -> attributes of it, or fields of its instances.
ATTRIBUTES = {
    "rollout.DynamicInferenceEngine": "state weights_version",
    "rollout.LLM": "engine state weights_version",
    "rollout.SuspendReport": "seconds bytes_released bytes_kept",
    "rollout.ResumeReport": "seconds bytes_restored graphs_recaptured num_requests_recomputed",
    "rollout.WeightUpdateReport": "version seconds stall_seconds num_bytes checksum",
    "rollout.DynamicInferenceRequest": """
        finish_reason completed_at_version policy_versions context_kv_version_min
        context_kv_version_mean staleness_at tracked_metadata get_metadata_types
        remaining_prompt_length succeeded failed add_event_error_transient
        add_event_error_nontransient add_event_fail
    """,
    "trainer_hooks.AsyncRolloutProducer": "state_dict load_state_dict",
}
