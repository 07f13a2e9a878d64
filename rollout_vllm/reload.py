"""repair_reload and drop_partial_load: mend what vLLM leaves wrong when it loads weights again.

VllmExecutor runs both in each of vLLM's workers, the first once, when the model is loaded. vLLM
computes on a CPU from packed copies of weights. Its reload leaves two kinds of packed copies as
they were.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn


def repair_reload(worker: Any) -> str:
    """Let each later reload of the worker's model pack all weights again.

    Returns why a reload would leave wrong weights even so; "" if it does not.
    """
    from vllm.platforms import current_platform

    model = worker.get_model()
    if current_platform.is_cpu():
        _repair_tied_heads(model)
    return _repair_experts(model)


def drop_partial_load(worker: Any) -> None:
    """Drop the tensors that a broken load has left in the worker's model.

    vLLM 0.32 buffers a layer's tensors until all have arrived. The next load would count the old
    tensors too, and finish the layer before all new ones have arrived.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in worker.get_model().modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            layerwise._place_kernel_tensors(layer, info)
            info.reset()


def _repair_experts(model: nn.Module) -> str:
    """Let each reload prepare the experts as the first load did.

    vLLM 0.32 packs experts while it makes their kernel (`fused_experts.
    process_weights_after_loading`). A reload finds the kernel made and leaves the step out, so that
    the kernel would read plain weights as packed ones. On GPUs recorded graphs hold the kernel's
    addresses, so it stays, and of the kernels there only MoonEP's keeps state from the first load.
    """
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if not isinstance(method, UnquantizedFusedMoEMethod):
            continue
        if method.unquantized_backend is UnquantizedMoeBackend.MOONEP:
            return "vLLM's reload keeps the old experts in MoonEP's kernel"
        if method.unquantized_backend is UnquantizedMoeBackend.CPU:
            method.process_weights_after_loading = MethodType(_without_kernel, method)
    return ""


def _without_kernel(method: Any, layer: nn.Module) -> None:
    """Prepare the experts of `layer` as after a first load."""
    method.moe_kernel = None
    type(method).process_weights_after_loading(method, layer)


def _repair_tied_heads(model: nn.Module) -> None:
    """Let an output layer that shares the embedding's weight also share its packed copy.

    A checkpoint has no tensor for such a layer. So a reload does not process it, and its logits
    would come from the packed copy of the first load.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
    )

    packed: list[Any] = [
        layer
        for layer in model.modules()
        if isinstance(getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod)
    ]
    heads = [layer for layer in packed if isinstance(layer, ParallelLMHead)]
    for layer in packed:
        for head in heads:
            if layer not in heads and layer.weight is head.weight:
                method = layer.quant_method
                method.process_weights_after_loading = MethodType(_WithHead(head), method)


class _WithHead:
    """Packs an embedding's weight after a load, also for the output layer `head`."""

    def __init__(self, head: Any) -> None:
        self._head = head

    def __call__(self, method: Any, layer: Any) -> None:
        type(method).process_weights_after_loading(method, layer)
        self._head.cpu_linear = layer.cpu_linear
