"""Signatures of vLLM that the adapter relies on.

    python3 tests/vllm/vllm_signatures.py [--write]
    python3 tests/vllm/vllm_signatures.py --source FOLDER RELEASE

compares the installed vLLM's signatures with the file of the tested release next to this program.
No output means that they are equal. With --source it writes the file of a release that cannot be
installed here, from the folder that its wheel was unpacked in.
"""

import os
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

# pylint: disable=wrong-import-position
from tests import library_signatures

RELEASE = os.environ.get("MLA_TEST_RELEASE", "0.32")
PATH = pathlib.Path(__file__).with_name(f"signatures_{RELEASE}.json")
NAMES = {
    "vllm.model_executor.layers.mla": [
        f"MultiHeadLatentAttentionWrapper.{name}" for name in ("__init__", "forward")],
    "vllm.model_executor.layers.attention.mla_attention": [
        "MLAAttention.forward", "MLAAttention.forward_impl"],
    "vllm.model_executor.layers.quantization.utils.quant_utils": ["get_and_maybe_dequant_weights"],
    "vllm.v1.attention.backend": [
        "AttentionBackend.customize_spec", "AttentionMetadataBuilder.__init__",
        "AttentionMetadataBuilder.build", "MLAAttentionImpl.__init__",
        "MLAAttentionImpl.forward_mha", "MLAAttentionImpl.forward_mqa",
        "MLAAttentionImpl.do_kv_cache_update", "CommonAttentionMetadata.__init__"],
    "vllm.v1.attention.backends.registry": ["register_backend"],
    "vllm.v1.core.sched.output": ["NewRequestData.__init__", "CachedRequestData.__init__",
                                  "SchedulerOutput.__init__"],
    "vllm.distributed.kv_transfer.kv_connector.factory": ["KVConnectorFactory.register_connector"],
    "vllm.distributed.kv_transfer.kv_connector.v1.base": [
        f"KVConnectorBase_V1.{name}" for name in (
            "__init__", "bind_connector_metadata", "clear_connector_metadata",
            "register_kv_caches", "start_load_kv", "wait_for_layer_load", "save_kv_layer",
            "wait_for_save", "get_block_ids_with_load_errors", "shutdown", "take_events",
            "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
            "update_connector_output", "request_finished", "requires_piecewise_for_cudagraph")],
}


def differences():
    """The differences between the installed `vllm` and the file."""
    return library_signatures.differences(NAMES, library_signatures.read(PATH))


def between(older, newer):
    """Names whose signatures differ in the files of two releases."""
    before, after = (library_signatures.read(PATH.with_name(f"signatures_{release}.json"))
                     for release in (older, newer))
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


if __name__ == "__main__":
    if "--source" in sys.argv:
        library_signatures.write(
            library_signatures.in_source(NAMES, pathlib.Path(sys.argv[2])),
            PATH.with_name(f"signatures_{sys.argv[3]}.json"))
        sys.exit()
    if "--write" in sys.argv:
        library_signatures.write(library_signatures.installed(NAMES), PATH)
    sys.exit("\n".join(differences()))
