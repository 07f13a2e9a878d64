"""lm-eval over a server: python lm_eval_client.py URL DIRECTORY.

Scores and texts must be those of lm-eval's own `hf` model on the same weights.
"""

from __future__ import annotations

import os
import sys

os.environ["OPENAI_API_KEY"] = "sesame"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

MAX_LENGTH = 64  # of a window, so that the longer texts below take several
PAIRS = [("The sky is", " blue"), ("1 + 1 =", " 2\n"), ("", "Once"), ("äö", "ü und mehr")]
# The first window of a context that is too long begins in its middle.
PAIRS += [("ab " * 40, "cd"), ("The sky", " is")]
TEXTS = ["abc def", "".join(f"{i} squared is {i * i}. " for i in range(12))]
TASKS = [
    ("Say", {"until": ["\n"], "max_gen_toks": 24, "do_sample": False}),
    ("Count to ten:", {"until": ["q", "zz"], "max_gen_toks": 24, "temperature": 0.0}),
]


def instances(kind: str, arguments: list[tuple[object, ...]]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=index)
        for index, each in enumerate(arguments)
    ]


def results_of(model: LM) -> tuple[list[tuple[float, bool]], list[float], list[str]]:
    return (
        model.loglikelihood(instances("loglikelihood", [*PAIRS])),
        model.loglikelihood_rolling(
            instances("loglikelihood_rolling", [(text,) for text in TEXTS])
        ),
        model.generate_until(instances("generate_until", [*TASKS])),
    )


def main(url: str, directory: str) -> None:
    served = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        model="model",
        tokenizer_backend="remote",
        tokenized_requests=True,
        # It takes two off: for the token that is generated, and for the first, which has no score.
        max_length=MAX_LENGTH + 2,
        num_concurrent=1,
        auth_token="sesame",
    )
    torch.set_num_threads(1)
    reference = HFLM(
        pretrained=directory, device="cpu", dtype="float32", max_length=MAX_LENGTH, batch_size=1
    )
    given, expected = results_of(served), results_of(reference)
    for (own, is_greedy), (score, would_be) in zip(given[0], expected[0], strict=True):
        assert abs(own - score) < 1e-3, (own, score)
        assert is_greedy == would_be
    for own, score in zip(given[1], expected[1], strict=True):
        assert abs(own - score) < 1e-3 * abs(score), (own, score)
    assert given[2] == expected[2], (given[2], expected[2])
    print("lm-eval: passed")


if __name__ == "__main__":
    main(*sys.argv[1:3])
