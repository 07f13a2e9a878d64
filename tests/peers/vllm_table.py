"""vLLM's tests: the files that run over our server, why the others do not, and known cases."""

from __future__ import annotations

from tests.peers.verdicts import Rule

VLLM_FILES = (
    "entrypoints/openai/chat_completion/test_batched_chat_completions.py",
    "entrypoints/openai/chat_completion/test_chat.py",
    "entrypoints/openai/chat_completion/test_chat_completion.py",
    "entrypoints/openai/chat_completion/test_chat_echo.py",
    "entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py",
    "entrypoints/openai/chat_completion/test_completion_with_function_calling.py",
    "entrypoints/openai/chat_completion/test_enable_force_include_usage.py",
    "entrypoints/openai/chat_completion/test_include_reasoning.py",
    "entrypoints/openai/chat_completion/test_logprob_token_ids.py",
    "entrypoints/openai/chat_completion/test_non_object_body_validation.py",
    "entrypoints/openai/chat_completion/test_root_path.py",
    "entrypoints/openai/completion/test_completion.py",
    "entrypoints/openai/completion/test_prompt_validation.py",
    "entrypoints/openai/models/test_models.py",
    "entrypoints/openai/test_chunked_prompt.py",
    "entrypoints/openai/test_return_token_ids.py",
    "entrypoints/openai/test_return_tokens_as_ids.py",
    "entrypoints/openai/test_session_id.py",
    "entrypoints/openai/test_stop_token_ids.py",
    "entrypoints/rl/return_routed_experts/test_openai_api.py",
    "entrypoints/rl/return_routed_experts/test_scale_out_api.py",
    "entrypoints/rl/state_transitions/test_pause_multi_frontend.py",
    "entrypoints/rl/state_transitions/test_pause_resume.py",
    "entrypoints/rl/state_transitions/test_sleep.py",
    "entrypoints/rl/state_transitions/test_weight_checker.py",
    "entrypoints/scale_out/token_in_token_out/test_serving_tokens.py",
    "entrypoints/scale_out/token_in_token_out/test_tokens_logprobs.py",
    "entrypoints/serve/exception_handling/test_validation_exception_handler.py",
    "entrypoints/serve/instrumentator/test_basic.py",
    "entrypoints/serve/instrumentator/test_metrics.py",
    "entrypoints/serve/instrumentator/test_orca_metrics.py",
    "entrypoints/serve/instrumentator/test_uds.py",
    "entrypoints/serve/lora/test_lora_adapters.py",
    "entrypoints/serve/middleware/test_optional_middleware.py",
    "entrypoints/serve/tokenize/test_tokenization.py",
)
VLLM_UNRUN_FILES: tuple[Rule, ...] = ()
VLLM_CASES: tuple[Rule, ...] = ()
