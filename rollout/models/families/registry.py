"""Registry of the model families. Used by ModelSpec, CausalLM and `rollout.models.layout`.

To add a family, write a file beside `llama.py` and list its Family in FAMILIES.
"""

from __future__ import annotations

from types import MappingProxyType

from rollout.errors import ModelError
from rollout.models.families.cohere2 import COHERE2
from rollout.models.families.deepseek_v3 import DEEPSEEK_V3
from rollout.models.families.gemma import GEMMA
from rollout.models.families.gemma2 import GEMMA2
from rollout.models.families.gemma3 import GEMMA3
from rollout.models.families.glm4 import GLM4
from rollout.models.families.glm4_moe import GLM4_MOE
from rollout.models.families.glm4_moe_lite import GLM4_MOE_LITE
from rollout.models.families.gpt_oss import GPT_OSS
from rollout.models.families.granite import GRANITE
from rollout.models.families.llama import LLAMA
from rollout.models.families.minimax_m2 import MINIMAX_M2
from rollout.models.families.ministral import MINISTRAL
from rollout.models.families.ministral3 import MINISTRAL3
from rollout.models.families.mistral import MISTRAL
from rollout.models.families.mixtral import MIXTRAL
from rollout.models.families.olmo2 import OLMO2
from rollout.models.families.olmo3 import OLMO3
from rollout.models.families.olmoe import OLMOE
from rollout.models.families.phi3 import PHI3
from rollout.models.families.qwen2 import QWEN2
from rollout.models.families.qwen2_moe import QWEN2_MOE
from rollout.models.families.qwen3 import QWEN3
from rollout.models.families.qwen3_moe import QWEN3_MOE
from rollout.models.families.seed_oss import SEED_OSS
from rollout.models.families.smollm3 import SMOLLM3
from rollout.models.family import Family

FAMILIES = MappingProxyType(
    {
        family.name: family
        for family in (
            *(LLAMA, QWEN2, QWEN3, MISTRAL, MINISTRAL, MINISTRAL3, PHI3, OLMO2, OLMO3, SMOLLM3),
            *(SEED_OSS, GRANITE, GLM4, GEMMA, GEMMA2, GEMMA3, COHERE2),
            *(QWEN3_MOE, QWEN2_MOE, MIXTRAL, OLMOE, GPT_OSS, MINIMAX_M2, GLM4_MOE),
            *(DEEPSEEK_V3, GLM4_MOE_LITE),
        )
    }
)


def find_family(model_type: object) -> Family:
    """Return the family of a config's `model_type`. Raises ModelError, which lists the supported
    families, if there is none."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        supported = ", ".join(sorted(FAMILIES))
        raise ModelError(f"model_type {model_type!r} is not supported; supported: {supported}")
    return family
