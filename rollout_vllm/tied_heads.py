"""prepare_tied_heads: lets vLLM compute logits with new weights where the head is the embedding.

VllmExecutor runs it in each of vLLM's workers after each reload.
"""

from __future__ import annotations

from typing import Any


def prepare_tied_heads(worker: Any) -> None:
    """Prepare each head that shares its weight with an embedding as after a first load.

    On CPUs vLLM computes logits from a copy of the head's weight in a layout of its own. A reload
    of vLLM 0.32 prepares only layers that have tensors in the update, and a tied head has none, so
    its copy would stay that of the first load.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    model = worker.get_model()
    weights = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, ParallelLMHead):
            weight = getattr(layer, "weight", None)
            if weight is not None and weights.get(id(weight)) != f"{name}.weight":
                layer.quant_method.process_weights_after_loading(layer)
