"""openai-python's tests: the files that run over our server, why the others do not, known cases."""

from __future__ import annotations

from tests.peers.runs import Run
from tests.peers.verdicts import Rule, differs, not_applicable

PAGE = "docs/peers.md"
_RESOURCES = "api_resources/"
OPENAI_RUNS = (
    Run(files=(f"{_RESOURCES}test_completions.py",), model_name="gpt-3.5-turbo-instruct"),
    Run(
        files=(f"{_RESOURCES}chat/test_completions.py", f"{_RESOURCES}test_models.py"),
        model_name="gpt-6-astra",
    ),
)
OPENAI_UNRUN_FILES: tuple[Rule, ...] = (
    *not_applicable("another route of OpenAI's service, which is not served", f"{_RESOURCES}*"),
    *not_applicable("the client's own code, against answers in the test: no server is asked", "*"),
)
OPENAI_CASES: tuple[Rule, ...] = (
    *differs(
        PAGE,
        "Keys of `logit_bias` must be token ids. Fields of OpenAI's service that need more than a "
        "model are refused.",
        f"{_RESOURCES}*completions.py::*::test_method_create_with_all_params_overload_*",
    ),
    *not_applicable(
        "chats are not stored, and models are not deleted",
        *(
            f"{_RESOURCES}chat/test_completions.py::*::test_{form}_{method}*"
            for form in ("method", "raw_response", "streaming_response")
            for method in ("retrieve", "update", "list", "delete")
        ),
        f"{_RESOURCES}test_models.py::*::test_method_delete*",
        f"{_RESOURCES}test_models.py::*::test_raw_response_delete*",
        f"{_RESOURCES}test_models.py::*::test_streaming_response_delete*",
    ),
)
