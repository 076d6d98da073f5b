"""Signatures of transformers that the adapter and its stand-in rely on.

`signatures.json` holds those of the release that the adapter was written for. The stand-in is
compared with it on every run of the tests, the library by check.py. With --write the installed
library's are written there.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pathlib
import sys
from typing import Any, Dict, List

PATH = pathlib.Path(__file__).with_name("signatures.json")
_LAYER = ("lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length",
          "offload", "prefetch", "reset", "reorder_cache")
_GROWS = ("crop", "batch_repeat_interleave", "batch_select_indices")
_CACHE = ("__init__", "update", "get_seq_length", "get_max_length", "get_mask_sizes",
          "get_query_offset", "reset", "reorder_cache", "activate_past_recording", *_GROWS)
# Modules of transformers, and the names in them.
NAMES = {
    "cache_utils": [*(f"CacheLayerMixin.{name}" for name in _LAYER),
                    *(f"DynamicLayer.{name}" for name in (*_LAYER[:5], *_GROWS)),
                    *(f"Cache.{name}" for name in _CACHE), "DynamicCache.__init__"],
    "masking_utils": ["AttentionMaskInterface.register", "causal_mask_function"],
    "modeling_utils": ["AttentionInterface.register", "AttentionInterface.get_interface",
                       "PreTrainedModel.set_attn_implementation",
                       "PreTrainedModel.register_forward_pre_hook"],
}


def _parameters(function: Any) -> List[str]:
    """Names of parameters, with stars where they have some, and = where they have a default."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [stars.get(parameter.kind, "") + parameter.name
            + ("=" if parameter.default is not inspect.Parameter.empty else "")
            for parameter in inspect.signature(function).parameters.values()
            if parameter.name not in ("self", "cls")]


def installed() -> Dict[str, List[str]]:
    """Those of the `transformers` that import finds."""
    found = {}
    for module, names in NAMES.items():
        loaded = importlib.import_module(f"transformers.{module}")
        for name in names:
            value: Any = loaded
            for part in name.split("."):
                value = getattr(value, part)
            found[f"{module}.{name}"] = _parameters(value)
    return found


def read() -> Dict[str, List[str]]:
    """Those of the file."""
    return json.loads(PATH.read_text(encoding="utf-8"))


def differences(want: Dict[str, List[str]]) -> List[str]:
    """Where the `transformers` that import finds differs."""
    got = installed()
    return [f"{name}: got {got.get(name)}, must be {want.get(name)}"
            for name in sorted({*want, *got}) if got.get(name) != want.get(name)]


if __name__ == "__main__":
    if "--write" in sys.argv:
        PATH.write_text(json.dumps(installed(), indent=1) + "\n", encoding="utf-8")
    else:
        sys.exit("\n".join(differences(read())))
