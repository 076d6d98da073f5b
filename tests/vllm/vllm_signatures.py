"""Signatures of vLLM that the adapter and its doubles rely on.

    python3 tests/vllm/vllm_signatures.py

compares the installed vLLM's with `signatures.json`, in which they are as read in vLLM's source of
August 2026; no output means that they are equal. The tests compare the doubles with that file.
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

# pylint: disable=wrong-import-position
from tests import library_signatures

PATH = pathlib.Path(__file__).with_name("signatures.json")
NAMES = {
    "vllm.model_executor.custom_op": ["PluggableLayer.register_oot"],
    "vllm.model_executor.layers.attention.mla_attention": [
        f"MLAAttention.{name}" for name in ("__init__", "forward", "forward_impl",
                                            "process_weights_after_loading", "get_kv_cache_spec")],
    "vllm.model_executor.layers.mla": [
        "MLAModules.__init__", "MultiHeadLatentAttentionWrapper.__init__",
        "MultiHeadLatentAttentionWrapper.forward"],
    "vllm.v1.core.sched.output": ["NewRequestData.__init__", "CachedRequestData.__init__",
                                  "SchedulerOutput.__init__"],
    "vllm.distributed.kv_transfer.kv_connector.v1.base": [
        f"KVConnectorBase_V1.{name}" for name in (
            "__init__", "bind_connector_metadata", "register_kv_caches", "start_load_kv",
            "wait_for_layer_load", "save_kv_layer", "wait_for_save", "shutdown",
            "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
            "request_finished", "requires_piecewise_for_cudagraph")],
}


def differences():
    """Where the `vllm` that import finds differs from the file."""
    return library_signatures.differences(NAMES, library_signatures.read(PATH))


if __name__ == "__main__":
    sys.exit("\n".join(differences()))
