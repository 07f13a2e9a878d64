"""SGLang's kits of tests: those that run over our server, why the others do not, known cases."""

from __future__ import annotations

from tests.peers.verdicts import Rule, differs, not_applicable

SGLANG_KITS = (
    "kits/abort_timeout_kit.py",
    "kits/basic_api_contract_kit.py",
    "kits/basic_decode_correctness_kit.py",
    "kits/basic_scheduler_stress_kit.py",
    "kits/matched_stop_kit.py",
    "kits/pause_generation_kit.py",
    "kits/radix_cache_server_kit.py",
)
SGLANG_UNRUN_KITS: tuple[Rule, ...] = (
    *not_applicable(
        "constrained output is refused",
        "kits/ebnf_constrained_kit.py",
        "kits/json_constrained_kit.py",
        "kits/json_mode_kit.py",
        "kits/regex_constrained_kit.py",
    ),
    *not_applicable(
        "a model that was trained must answer, or one of another kind",
        "ascend/npu_eval_accuracy_kit.py",
        "kits/eval_accuracy_kit.py",
        "kits/kl_divergence_kit.py",
        "kits/lm_eval_kit.py",
        "kits/mmmu_vlm_kit.py",
        "kits/reasoning_kit.py",
        "kits/vlm_perf_kit.py",
    ),
    *not_applicable(
        "other protocols, sessions, speculative decoding and separate prefill are not served",
        "kits/anthropic_messages_kit.py",
        "kits/pd_parity_kit.py",
        "kits/spec_decoding_kit.py",
        "kits/streaming_session_kit.py",
    ),
    *not_applicable(
        "SGLang's own classes, benchmarks and log lines, not a server",
        "kits/cache_hit_kit.py",
        "kits/dsa_metadata_kit.py",
        "kits/fwd_occupancy_kit.py",
        "kits/perf_bench_kit.py",
        "kits/prefix_cache_branching_kit.py",
        "kits/unified_radix_cache_kit.py",
    ),
)
SGLANG_CASES: tuple[Rule, ...] = (
    *not_applicable(
        "a model that was trained must answer",
        "kits_over_http.py::TestDecodeCorrectness::test_capital_france",
        "kits_over_http.py::TestDecodeCorrectness::test_basic_math",
        "kits_over_http.py::TestDecodeCorrectness::test_color_completion",
        "kits_over_http.py::TestSchedulerStress::test_streaming_response",
        "kits_over_http.py::TestSchedulerStress::test_concurrent_requests",
        "kits_over_http.py::TestMatchedStop::test_finish_stop_eos",
    ),
    *differs(
        "docs/peers.md",
        "Choices of `/v1` have vLLM's `stop_reason`, not SGLang's `matched_stop`.",
        "kits_over_http.py::TestMatchedStop::test_finish_length",
        "kits_over_http.py::TestMatchedStop::test_finish_stop_str",
    ),
    *differs(
        "docs/peers.md",
        "`stop_regex` of SGLang is refused.",
        "kits_over_http.py::TestMatchedStop::test_finish_stop_regex_str",
    ),
)
