"""TRL's VLLMClient and its asynchronous trainer's WeightTransferClient against a server:
python trl_trainer.py URL DIRECTORY ROOT. vllm is a stub, which sends over gloo.
"""

from __future__ import annotations

import sys

from stub_vllm import stub_directory

sys.path.insert(0, stub_directory())

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncVLLMClient
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient
from trl.generation.vllm_client import VLLMClient


def main(url: str, directory: str, root: str) -> None:
    PartialState(cpu=True)  # TRL's logger wants it
    policy = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    client = VLLMClient(base_url=url)
    check_log_probs(client, policy)
    info = client.get_server_info()
    assert info["weight_transfer_config"] == {"backend": "gloo"}
    assert client.get_world_size() == 1

    named = list(policy.named_parameters())
    update_info = {
        "names": [name for name, _ in named],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
        "shapes": [list(tensor.shape) for _, tensor in named],
    }
    transfer = WeightTransferClient(AsyncVLLMClient(url), update_info)
    transfer.init_weight_transfer()
    for _ in range(2):
        with torch.no_grad():
            for _, tensor in named:
                tensor.mul_(1.05)
        transfer.pause()
        transfer.send_weights(iter(named))
        transfer.resume()
        client.reset_prefix_cache()
        check_log_probs(client, policy)
    transfer.destroy()
    check_a_fault_is_told(url, update_info, named)
    check_log_probs(client, policy)
    print("trl: passed")


def check_log_probs(client: VLLMClient, policy: torch.nn.Module) -> None:
    """The server's log-probs of sampled tokens are those of `policy`."""
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    reply = client.generate(prompts, n=2, max_tokens=8, temperature=1.0, logprobs=0)
    assert reply["prompt_ids"] == prompts
    for i, ids in enumerate(reply["completion_ids"]):
        sequence = prompts[i // 2] + ids
        with torch.no_grad():
            logits = policy(torch.tensor([sequence])).logits[0].log_softmax(-1)
        start = len(prompts[i // 2])
        expected = [logits[start + j - 1, token].item() for j, token in enumerate(ids)]
        given = [row[0] for row in reply["logprobs"][i]]
        torch.testing.assert_close(torch.tensor(given), torch.tensor(expected), atol=1e-3, rtol=0)


def check_a_fault_is_told(url: str, update_info: dict, named: list) -> None:
    """An update with a wrong name fails at once, and the server serves what it had."""
    wrong = {**update_info, "names": ["model.wrong", *update_info["names"][1:]]}
    transfer = WeightTransferClient(AsyncVLLMClient(url), wrong)
    transfer.init_weight_transfer()
    transfer.pause()
    told = ""
    try:
        transfer.send_weights((name, tensor * 0) for name, tensor in named)
    except RuntimeError as fault:
        told = str(fault.__cause__)
    assert "model.wrong" in told, told
    transfer.resume()


if __name__ == "__main__":
    main(*sys.argv[1:])
