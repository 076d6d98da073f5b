"""Signatures of transformers that the adapter and its stand-in rely on.

`signatures.json` holds those of the release that the adapter was written for. The stand-in is
compared with it on every run of the tests, the library by check.py. With --write the installed
library's are written there.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Dict, List

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

# pylint: disable=wrong-import-position
from tests import library_signatures

PATH = pathlib.Path(__file__).with_name("signatures.json")
_LAYER = ("lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length",
          "offload", "prefetch", "reset", "reorder_cache")
_GROWS = ("crop", "batch_repeat_interleave", "batch_select_indices")
_CACHE = ("__init__", "update", "get_seq_length", "get_max_length", "get_mask_sizes",
          "get_query_offset", "reset", "reorder_cache", "activate_past_recording", *_GROWS)
NAMES = {
    "transformers.cache_utils": [
        *(f"CacheLayerMixin.{name}" for name in _LAYER),
        *(f"DynamicLayer.{name}" for name in (*_LAYER[:5], *_GROWS)),
        *(f"Cache.{name}" for name in _CACHE), "DynamicCache.__init__"],
    "transformers.masking_utils": ["AttentionMaskInterface.register", "causal_mask_function"],
    "transformers.modeling_utils": [
        "AttentionInterface.register", "AttentionInterface.get_interface",
        "PreTrainedModel.set_attn_implementation", "PreTrainedModel.register_forward_pre_hook"],
}


def read() -> Dict[str, List[str]]:
    """Those of the file."""
    return library_signatures.read(PATH)


def differences(want: Dict[str, List[str]]) -> List[str]:
    """Where the `transformers` that import finds differs."""
    return library_signatures.differences(NAMES, want)


if __name__ == "__main__":
    if "--write" in sys.argv:
        library_signatures.write(NAMES, PATH)
    else:
        sys.exit("\n".join(differences(read())))
