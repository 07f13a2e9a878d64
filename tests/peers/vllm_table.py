"""vLLM's tests: the files that run over our server, why the others do not, and known cases."""

from __future__ import annotations

from tests.peers.verdicts import Rule, not_applicable

_CHAT = "entrypoints/openai/chat_completion/"
_COMPLETION = "entrypoints/openai/completion/"
_OPENAI = "entrypoints/openai/"
_RL = "entrypoints/rl/state_transitions/"
_SCALE_OUT = "entrypoints/scale_out/token_in_token_out/"
_SERVE = "entrypoints/serve/"
_PAGE = "docs/peers.md"

VLLM_FILES = (
    f"{_CHAT}test_chat.py",
    f"{_CHAT}test_chat_completion.py",
    f"{_CHAT}test_chat_echo.py",
    f"{_CHAT}test_chat_logit_bias_validation.py",
    f"{_CHAT}test_completion_with_function_calling.py",
    f"{_CHAT}test_enable_force_include_usage.py",
    f"{_CHAT}test_include_reasoning.py",
    f"{_CHAT}test_logprob_token_ids.py",
    f"{_CHAT}test_root_path.py",
    f"{_COMPLETION}test_completion.py",
    f"{_COMPLETION}test_prompt_validation.py",
    f"{_OPENAI}models/test_models.py",
    f"{_OPENAI}test_chunked_prompt.py",
    f"{_OPENAI}test_return_token_ids.py",
    f"{_OPENAI}test_return_tokens_as_ids.py",
    "entrypoints/rl/return_routed_experts/test_openai_api.py",
    "entrypoints/rl/return_routed_experts/test_scale_out_api.py",
    f"{_RL}test_pause_multi_frontend.py",
    f"{_RL}test_pause_resume.py",
    f"{_RL}test_sleep.py",
    f"{_RL}test_weight_checker.py",
    f"{_SCALE_OUT}test_serving_tokens.py",
    f"{_SERVE}instrumentator/test_basic.py",
    f"{_SERVE}instrumentator/test_metrics.py",
    f"{_SERVE}instrumentator/test_orca_metrics.py",
    f"{_SERVE}instrumentator/test_uds.py",
    f"{_SERVE}middleware/test_optional_middleware.py",
    f"{_SERVE}tokenize/test_tokenization.py",
)

VLLM_UNRUN_FILES: tuple[Rule, ...] = (
    *not_applicable(
        "embeddings, classes, scores and rewards of pooling models are not served",
        "entrypoints/pooling/*",
        "entrypoints/generate/generative_scoring/*",
        "entrypoints/generate/structured_decisions/*",
        f"{_OPENAI}decisions/*",
        "entrypoints/unit_tests/test_chat_billing_header.py",
    ),
    *not_applicable(
        "images, video, speech and embeddings in prompts are not served",
        "entrypoints/multimodal/*",
        "entrypoints/speech_to_text/*",
        f"{_CHAT}test_chat_completion_with_prompt_embeds.py",
        f"{_CHAT}test_extra_content_fields.py",
        f"{_COMPLETION}test_completion_with_prompt_embeds.py",
        f"{_OPENAI}test_openai_schema.py",
        f"{_SCALE_OUT}test_mm_serde.py",
        f"{_SCALE_OUT}test_serving_multimodal_tokens.py",
        f"{_SERVE}tokenize/test_tokenization_vlm.py",
        f"{_SERVE}tokenize/test_tokenize_then_chat_vlm.py",
    ),
    *not_applicable(
        "protocols of others (Anthropic, Cohere, OpenAI's responses, SageMaker) are not served",
        "entrypoints/anthropic/*",
        "entrypoints/cohere/*",
        f"{_OPENAI}responses/*",
        f"{_SERVE}sagemaker/*",
    ),
    *not_applicable(
        "renderers, derenderers, batches of chats and calls of workers are not served",
        "entrypoints/scale_out/derender/*",
        "entrypoints/scale_out/ec_integration/*",
        "entrypoints/scale_out/render/*",
        f"{_CHAT}test_batched_chat_completions.py",
        f"{_OPENAI}test_render_parity.py",
        f"{_OPENAI}test_render_token_offsets.py",
        f"{_SERVE}dev/rpc/*",
    ),
    *not_applicable(
        "a model that was trained must answer: it calls tools, thinks or knows the answer",
        "entrypoints/tool_parsers/*",
        "tool_use/*",
        f"{_CHAT}test_thinking_token_budget.py",
        f"{_OPENAI}correctness/*",
        "evals/*",
    ),
    *not_applicable(
        "weights in files of tensorizer, or none of the tokenizer, come from Hugging Face",
        f"{_COMPLETION}test_tensorizer_entrypoint.py",
        f"{_COMPLETION}test_token_in_token_out.py",
    ),
    *not_applicable(
        "adapters are not loaded over HTTP under names of their own",
        f"{_SERVE}lora/test_lora_adapters.py",
    ),
    *not_applicable(
        "several GPUs, or CUDA's memory of another process",
        "entrypoints/rl/weight_transfer_metrics/test_across_api_servers_metrics.py",
        "entrypoints/rl/weight_transfer/*",
    ),
    *not_applicable(
        "vLLM's command line, processes and LLM class, not a server",
        "entrypoints/cli/*",
        "entrypoints/common/*",
        "entrypoints/launchers/*",
        "entrypoints/llm/*",
        "entrypoints/unit_tests/*",
    ),
    *not_applicable(
        "vLLM's own classes of its server, in the test's process",
        f"{_CHAT}test_chat_error.py",
        f"{_CHAT}test_message_assembly.py",
        f"{_CHAT}test_non_object_body_validation.py",
        f"{_CHAT}test_serving_chat.py",
        f"{_CHAT}test_stream_processor.py",
        f"{_CHAT}test_thinking_token_budget_validation.py",
        f"{_COMPLETION}test_completion_error.py",
        f"{_COMPLETION}test_completion_text_offset.py",
        f"{_COMPLETION}test_lora_resolvers.py",
        f"{_OPENAI}parser/*",
        f"{_OPENAI}test_penalty_default_resolution.py",
        f"{_OPENAI}test_reasoning_enable_thinking.py",
        f"{_OPENAI}test_session_id.py",
        f"{_OPENAI}test_stop_token_ids.py",
        f"{_OPENAI}test_tool_calls_serialization.py",
        f"{_OPENAI}test_tool_choice_content_none.py",
        f"{_OPENAI}test_watermarking.py",
        "entrypoints/rl/return_routed_experts/test_route_request_bodies.py",
        "entrypoints/rl/weight_transfer_metrics/test_weight_operation_metrics.py",
        "entrypoints/scale_out/test_factories.py",
        f"{_SCALE_OUT}test_generate_stream.py",
        f"{_SCALE_OUT}test_protocol.py",
        f"{_SCALE_OUT}test_tokens_logprobs.py",
        f"{_SERVE}exception_handling/*",
        f"{_SERVE}lora/test_serving_models.py",
        f"{_SERVE}middleware/test_authentication_middleware.py",
        f"{_SERVE}middleware/test_cors_middleware.py",
        f"{_SERVE}test_profile_api_router.py",
        f"{_SERVE}tokenize/test_serving_tokenization.py",
        f"{_SERVE}utils/*",
    ),
    *not_applicable(
        "vLLM's engine, kernels, models and tools, in the test's process",
        *(
            f"{folder}/*"
            for folder in (
                *("basic_correctness", "benchmarks", "compile", "config", "cuda", "detokenizer"),
                *("device_allocator", "distributed", "engine", "fusion", "ir", "jit_monitor"),
                *(
                    "kernels",
                    "lora",
                    "model_executor",
                    "models",
                    "multimodal",
                    "parser",
                    "platforms",
                ),
                *("plugins_tests", "quantization", "reasoning", "renderers", "rocm", "samplers"),
                *("spec_decode", "standalone_tests", "tokenizers_", "tool_parsers", "tools"),
                *("tracing", "transformers_utils", "utils_", "v1", "watermarking"),
            )
        ),
        "test_*",
    ),
)
VLLM_CASES: tuple[Rule, ...] = (
    *not_applicable(
        "an adapter is not served under a name of its own",
        f"{_CHAT}test_chat.py::*[zephyr-lora]",
        f"{_SCALE_OUT}test_serving_tokens.py::test_generate_with_lora_adapter*",
        f"{_OPENAI}models/test_models.py::test_check_models",
    ),
    *not_applicable(
        "SageMaker's route, renderers, calls of workers and batch files are not served",
        f"{_CHAT}test_chat.py::test_invocations",
        f"{_RL}test_weight_checker.py::*::test_reset_changes_weights_and_reload_restores_them",
        f"{_SCALE_OUT}test_serving_tokens.py::test_derender_mode_with_parser*",
        f"{_SERVE}instrumentator/test_metrics.py::test_metrics_exist_run_batch",
    ),
    *not_applicable(
        "images are not served", f"{_SERVE}instrumentator/test_metrics.py::*multimodal]"
    ),
    *not_applicable(
        "a model that was trained must answer",
        f"{_CHAT}test_chat.py::test_complex_message_content",
        f"{_CHAT}test_chat_echo.py::test_chat_session_with_echo_and_continue_final_message*",
        f"{_OPENAI}test_return_token_ids.py::test_chat_completion_with_tool_use",
        f"{_SCALE_OUT}test_serving_tokens.py::test_stop_string_workflow",
    ),
    *not_applicable(
        "the test expects answers within half a second, or what another thread has read at once",
        f"{_SERVE}instrumentator/test_basic.py::test_request_cancellation*",
        f"{_RL}test_pause_resume.py::*::test_mode_request_lifecycle*-abort]",
        f"{_RL}test_pause_resume.py::*::test_mode_request_lifecycle*-wait]",
    ),
    *not_applicable(
        "a class of vLLM is needed in the test's process",
        f"{_COMPLETION}test_prompt_validation.py::test_load_prompt_embeds*",
    ),
    *not_applicable(
        "one process serves",
        f"{_RL}test_pause_multi_frontend.py::test_pause_rejects_on_every_api_server",
    ),
)
