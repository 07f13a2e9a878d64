"""lm-eval over a server: python lm_eval_client.py URL MODEL_DIRECTORY PYTHON_WITH_TORCH.

Log-likelihoods must be those of transformers on the same weights, which that Python computes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

os.environ["OPENAI_API_KEY"] = "sesame"

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

PAIRS = [("The sky is", " blue"), ("1 + 1 =", " 2\n"), ("", "Once"), ("äö", "ü und mehr")]
REFERENCE = """
import json, sys, tokenizers, torch, transformers
directory, pairs = sys.argv[1], json.loads(sys.argv[2])
model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
tokenizer = tokenizers.Tokenizer.from_file(directory + "/tokenizer.json")
found = []
for context, continuation in pairs:
    first = tokenizer.encode(context).ids or [tokenizer.token_to_id("<|im_end|>")]
    second = tokenizer.encode(continuation).ids
    with torch.no_grad():
        logits = model(torch.tensor([first + second])).logits[0].log_softmax(-1)
    rows = logits[len(first) - 1 : -1]
    total = sum(float(row[i]) for row, i in zip(rows, second))
    found.append([total, all(int(row.argmax()) == i for row, i in zip(rows, second))])
print(json.dumps(found))
"""


def instances(kind: str, arguments: list[tuple[object, ...]]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=index)
        for index, each in enumerate(arguments)
    ]


def main(url: str, directory: str, python: str) -> None:
    model = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        model="model",
        tokenizer_backend="remote",
        tokenized_requests=True,
        max_length=512,
        num_concurrent=1,
        auth_token="sesame",
    )
    given = model.loglikelihood(instances("loglikelihood", [*PAIRS]))
    command = [python, "-c", REFERENCE, directory, json.dumps(PAIRS)]
    expected = json.loads(subprocess.check_output(command, text=True))
    for (own, is_greedy), (reference, would_be) in zip(given, expected, strict=True):
        assert abs(own - reference) < 1e-3, (own, reference)
        assert is_greedy == would_be
    (rolling,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", [("abc def",)]))
    assert rolling < 0
    (text,) = model.generate_until(
        instances("generate_until", [("Say", {"until": ["\n"], "max_gen_toks": 8})])
    )
    assert isinstance(text, str)
    print("lm-eval: passed")


if __name__ == "__main__":
    main(*sys.argv[1:4])
