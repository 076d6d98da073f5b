"""The entry point of `vllm.general_plugins`: vLLM calls it in every process, maybe more than
once."""

from __future__ import annotations

import os

SWITCH = "MLA_VLLM"


def register() -> None:
    """Puts the wrapper in the place of vLLM's, if the environment has MLA_VLLM=1: an installed
    package alone must not change an engine."""
    if os.environ.get(SWITCH) != "1":
        return
    # pylint: disable=import-outside-toplevel
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    from mla_client.vllm.layer import RemoteMlaWrapper

    name = "MultiHeadLatentAttentionWrapper"
    known = op_registry_oot.get(name)
    if known is None:
        PluggableLayer.register_oot(RemoteMlaWrapper, name=name)
    elif known is not RemoteMlaWrapper:
        raise RuntimeError(f"{name} has been replaced already, by {known}")
