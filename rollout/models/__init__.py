"""Decoder language models for inference, read from and written to Hugging Face checkpoints.

Programs and benchmarks import the public names in `__all__` from here. A name's module is imported
when the name is first used.
"""

from rollout.lazy_names import lazy_names as _lazy_names

# Module -> the names that this package takes from it. The stub beside this file lists the same.
_HOMES = {
    "rollout.models.causal_lm": "CausalLM",
    "rollout.models.checkpoints.loading": "build_model save_hf_directory",
    "rollout.models.spec": "ModelSpec",
}
__getattr__, __all__ = _lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
