"""Signatures and fields of SGLang that the adapter and its doubles rely on.

    python3 tests/sglang/sglang_signatures.py

compares the installed SGLang's with `signatures.json`, in which they are as read in SGLang's source
of August 2026; no output means that they are equal. The tests compare the doubles with that file.
"""

import importlib
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

# pylint: disable=wrong-import-position
from tests import library_signatures

PATH = pathlib.Path(__file__).with_name("signatures.json")
NAMES = {
    "sglang.srt.layers.attention.attention_registry": ["register_attention_backend"],
    "sglang.srt.layers.attention.base_attn_backend": [
        f"AttentionBackend.{name}" for name in (
            "init_forward_metadata", "init_forward_metadata_out_graph",
            "init_forward_metadata_in_graph", "init_cuda_graph_state",
            "get_cuda_graph_seq_len_fill_value", "forward", "forward_decode", "forward_extend")],
    "sglang.srt.layers.radix_attention": ["RadixAttention.__init__"],
    "sglang.srt.mem_cache.memory_pool": [
        f"ReqToTokenPool.{name}" for name in ("__init__", "alloc", "free")],
    "sglang.srt.model_executor.forward_batch_info": ["ForwardMode.is_decode",
                                                     "ForwardMode.is_idle"],
    "sglang.srt.models.deepseek_common.attention_backend_handler": [
        "AttentionBackendRegistry.register", "AttentionBackendRegistry.get_handler"],
    "sglang.srt.server_args": ["add_attention_backend_choices"],
}
# Of classes whose other fields do not matter.
FIELDS = {
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch": [
        "forward_mode", "req_pool_indices", "seq_lens", "seq_lens_cpu", "rids", "extend_seq_lens",
        "extend_prefix_lens"],
    "sglang.srt.model_executor.forward_batch_info.ForwardMode": ["EXTEND", "DECODE", "MIXED",
                                                                 "IDLE"],
    "sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods."
    "AttnForwardMethod": ["MLA"],
    "sglang.srt.server_args.ServerArgs": [
        "tp_size", "pp_size", "enable_dp_attention", "disable_radix_cache",
        "disable_overlap_schedule", "speculative_algorithm", "cuda_graph_config",
        "enable_two_batch_overlap", "enable_pdmux", "disaggregation_mode", "kv_cache_dtype"],
}


def missing():
    """Fields that the `sglang` that import finds lacks."""
    found = []
    for path, names in FIELDS.items():
        module, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        has = {field for each in value.__mro__ for field in getattr(each, "__annotations__", ())}
        found += [f"{path}.{field}: missing" for field in names
                  if field not in has and not hasattr(value, field)]
    return found


def differences():
    """Where the `sglang` that import finds differs."""
    return library_signatures.differences(NAMES, library_signatures.read(PATH)) + missing()


if __name__ == "__main__":
    sys.exit("\n".join(differences()))
