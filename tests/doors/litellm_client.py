"""litellm against a server: python litellm_client.py URL."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

KEY = "sesame"


def main(url: str) -> None:
    fields: Any = {
        "api_base": f"{url}/v1",
        "api_key": KEY,
        "messages": [{"role": "user", "content": "Hello"}],
        "seed": 2,
    }
    for name in ("hosted_vllm/model", "openai/model"):
        whole = litellm.completion(name, max_tokens=9, **fields)
        text = whole.choices[0].message.content
        stream = litellm.completion(name, max_tokens=9, stream=True, **fields)
        assert "".join(c.choices[0].delta.content or "" for c in stream) == text
        assert whole.usage.completion_tokens == 9
        try:
            litellm.completion(name, max_tokens=100_000, **fields)
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError("a context that is too long was not told as such")
    given = litellm.completion(
        "hosted_vllm/model", max_tokens=9, extra_body={"return_token_ids": True}, **fields
    )
    assert given.prompt_token_ids
    assert len(given.choices[0].provider_specific_fields["token_ids"]) == 9
    print("litellm: passed")


if __name__ == "__main__":
    main(sys.argv[1])
