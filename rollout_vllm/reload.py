"""repair_reload: makes vLLM's reload of weights right for mixtures of experts on CPUs.

VllmExecutor runs it in each of vLLM's workers, once, when the model is loaded.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn


def repair_reload(worker: Any) -> str:
    """Let each later reload of the worker's model prepare the experts again.

    Returns why a reload would leave wrong experts even so; "" if it does not.

    Experts on a CPU are computed from weights in a layout of their own. vLLM 0.32 brings them into
    it while it makes their kernel (`fused_experts.process_weights_after_loading`). A reload finds
    the kernel made and leaves the step out, so that the kernel would read plain weights as packed
    ones. Without a kernel a reload does all that the first load did. On GPUs recorded graphs hold
    the kernel's addresses, so it stays, and of the kernels there only MoonEP's keeps state from the
    first load.
    """
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    for layer in worker.get_model().modules():
        method = getattr(layer, "quant_method", None)
        if not isinstance(method, UnquantizedFusedMoEMethod):
            continue
        if method.unquantized_backend is UnquantizedMoeBackend.MOONEP:
            return "vLLM's reload keeps the old experts in MoonEP's kernel"
        if method.unquantized_backend is UnquantizedMoeBackend.CPU:
            method.process_weights_after_loading = MethodType(_process_anew, method)
    return ""


def _process_anew(method: Any, layer: nn.Module) -> None:
    """Prepare the experts of `layer` as after a first load."""
    method.moe_kernel = None
    type(method).process_weights_after_loading(method, layer)
