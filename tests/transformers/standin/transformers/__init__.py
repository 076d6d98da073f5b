"""A stand-in for the parts of transformers 5.17 that the adapter meets, on any torch.

What is here: the registries, caches and the calls that models and `generate()` make, in the order
in which they are made. Why: the distribution has torch and not transformers. What may be relied on:
signatures are those of the library, as `../../signatures.json` has them; weights are random.
"""

from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface, PreTrainedModel
from transformers.models import (DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config,
                                 DeepseekV3ForCausalLM, Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM,
                                 LongcatFlashConfig, LongcatFlashForCausalLM, YoutuConfig,
                                 YoutuForCausalLM)

__version__ = "5.17.0"

__all__ = ["AttentionInterface", "AttentionMaskInterface", "Cache", "DeepseekV2Config",
           "DeepseekV2ForCausalLM", "DeepseekV3Config", "DeepseekV3ForCausalLM", "DynamicCache",
           "Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", "LongcatFlashConfig",
           "LongcatFlashForCausalLM", "PreTrainedModel", "YoutuConfig", "YoutuForCausalLM"]
