"""Log-probs of a batch by forward passes over trees of its tokens (`token_tree`).

Used by `trainer_hooks.update.micro_batches`. Trees need a causal model of transformers that takes a
position id for each token and a mask for each pair of tokens. `tree_fault` tests a model by
comparison with a plain pass.

Shape letters: B rows, T positions, N nodes, E hidden size, V vocabulary, R nodes that predict a
trained token, M trained tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rollout.models.plain_tensors import is_sharded
from trainer_hooks.losses.head_logprobs import Head, head_logprobs, logits_logprobs
from trainer_hooks.update.lean_passes import embeddings_in_place
from trainer_hooks.update.model_checks import cached_fault, difference
from trainer_hooks.update.token_tree import TokenTree


def tree_logprobs(
    policy: nn.Module, tokens_BT: Tensor, mask_BT: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of the tokens where `mask_BT` is True, float32 [B, T].

    Log-probs and entropies are 0 elsewhere. Take their gradients by `backward()`, which may add the
    gradients of embeddings and head in place. `mask_BT` must be False in column 0, because no token
    predicts it. Padding, and tokens from a row's last trained token on, are not computed.
    """
    device = tokens_BT.device
    tree = TokenTree.of(rows_before_last(tokens_BT, mask_BT))
    rows_M, columns_M = mask_BT.cpu().nonzero(as_tuple=True)
    nodes_R, index_M = tree.nodes_BT[rows_M, columns_M - 1].unique(return_inverse=True)
    order_M = index_M.argsort(stable=True)
    nodes_R, index_M = nodes_R.to(device), index_M[order_M].to(device)
    where = rows_M[order_M].to(device), columns_M[order_M].to(device)
    inputs, pairs = _inputs(policy, tree, device), (index_M, tokens_BT[where], temperature)
    if (head := _plain_head(policy)) is None:
        logits_RV = policy(**inputs, logits_to_keep=nodes_R).logits[0]
        logprobs_M, entropies_R = logits_logprobs(logits_RV, *pairs)
    else:
        with embeddings_in_place(_model(policy).get_input_embeddings()):
            hidden_RE = _body(policy)(**inputs).last_hidden_state[0, nodes_R]
        logprobs_M, entropies_R = head_logprobs(hidden_RE, head, *pairs)
    zeros_BT = torch.zeros(tokens_BT.shape, device=device)
    return zeros_BT.index_put(where, logprobs_M), zeros_BT.index_put(where, entropies_R[index_M])


def rows_before_last(tokens_BT: Tensor, mask_BT: Tensor) -> list[list[int]]:
    """Return the tokens of each row before its last trained token."""
    columns_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    ends = (mask_BT * columns_T).amax(dim=1).tolist()
    return [row[:end] for row, end in zip(tokens_BT.tolist(), ends, strict=True)]


def _inputs(policy: nn.Module, tree: TokenTree, device: torch.device) -> dict[str, Any]:
    config: Any = policy.config
    mask_NN = tree.attention_mask().to(device)
    if config._attn_implementation == "eager":  # which adds the mask to the scores
        dtype = next(policy.parameters()).dtype
        zeros_NN = torch.zeros(mask_NN.shape, dtype=dtype, device=device)
        mask_NN = zeros_NN.masked_fill(~mask_NN, torch.finfo(dtype).min)
    return {
        "input_ids": tree.tokens_N[None].to(device),
        "position_ids": tree.depths_N[None].to(device),
        "attention_mask": mask_NN[None, None],
        "use_cache": False,
    }


def _body(policy: Any) -> Any:
    return _model(policy).base_model


def _model(policy: Any) -> Any:
    return policy.get_base_model() if hasattr(policy, "get_base_model") else policy


def _plain_head(policy: Any) -> Head | None:
    linear = _model(policy).get_output_embeddings()
    # FSDP2 gathers weights only in a pass of the whole model. A head with an adapter is no Linear.
    if type(linear) is not nn.Linear or any(map(is_sharded, policy.parameters())):
        return None
    config = policy.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(weight_VE=linear.weight, bias_V=linear.bias, scale=scale, softcap=softcap)


def pair_cost(policy: Any) -> float:
    """Return the cost of attention for one pair of tokens over the cost of a token's products.

    Costs are numbers of multiplications. A pair costs 2 heads * head_dim in each layer. A token
    costs the number of the body's parameters without its embeddings.
    """
    body = _body(policy)
    config = body.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    num_weights = sum(each.numel() for each in body.parameters())
    num_weights -= body.get_input_embeddings().weight.numel()
    return float(2 * heads * head_dim * config.num_hidden_layers / max(num_weights, 1))


def max_depth(policy: Any) -> int | None:
    """Return the size of the model's sliding window or attention chunk, or None if it has neither.

    A tree's mask replaces the masks of windows and chunks, so rows must fit into them.
    """
    config = policy.config.get_text_config()
    names = ("sliding_window", "attention_chunk_size")
    return min((size for name in names if (size := getattr(config, name, None))), default=None)


def tree_fault(policy: Any, device: torch.device) -> str | None:
    """Return a text on why `policy` cannot compute trees, or None if it can.

    The first call with a module compares two small passes over trees with a plain pass.
    """
    if not isinstance(policy, nn.Module) or not hasattr(policy, "config"):
        return "it is no module of transformers"
    return cached_fault(_compare, policy, device)


# Token ids that any vocabulary has. The prefix continues with a sibling and with _BEHIND, whose
# logits are compared.
_PREFIX, _BEHIND = list(range(1, 7)), list(range(3, 11))
_SIBLINGS = list(range(8, 0, -1)), list(range(2, 10))


def _compare(policy: nn.Module, device: torch.device) -> str | None:
    try:
        alone_NV = policy(input_ids=torch.tensor([_PREFIX + _BEHIND], device=device)).logits[0]
        one_NV, other_NV = (
            _tree_logits(policy, [_PREFIX + sibling, _PREFIX + _BEHIND], device)
            for sibling in _SIBLINGS
        )
    except Exception as error:  # the model's own code, with inputs it may not know
        return f"its forward pass raises {type(error).__name__}: {error}"
    return difference(alone_NV, one_NV, other_NV)


def _tree_logits(policy: nn.Module, rows: list[list[int]], device: torch.device) -> Tensor:
    tree = TokenTree.of(rows)
    inputs, nodes_T = _inputs(policy, tree, device), tree.nodes_BT[-1].to(device)
    if (head := _plain_head(policy)) is None:
        logits_TV: Tensor = policy(**inputs, logits_to_keep=nodes_T).logits[0]
        return logits_TV
    return head.logits(_body(policy)(**inputs).last_hidden_state[0, nodes_T])
