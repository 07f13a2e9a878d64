"""openai-python's tests: the files that run over our server, why the others do not, known cases."""

from __future__ import annotations

from tests.peers.runs import Run
from tests.peers.verdicts import Rule, not_applicable

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
OPENAI_CASES: tuple[Rule, ...] = ()
