"""Restores settings that vLLM's CPU platform changes, in every process of the engine. This is an
entry point of vllm.general_plugins, next to the package's own.

For MLA the platform selects only CPU_MLA and AMX_MLA, which here name the package's backend. The
platform turns asynchronous scheduling off. On machines without AMX it also turns off chunked
prefill with its limit of tokens, and prefix caching. All of these get the case's values again. In
addition, later stages of a pipeline get the buffers for the previous stage's tensors, because vLLM
makes them only in a run that eager mode omits.
"""

import os

BACKEND = "mla_client.vllm.backend.MlaServerBackend"
KEPT = ("enable_chunked_prefill", "max_num_batched_tokens")


def register():
    """Called by vLLM after the package's own register."""
    # pylint: disable=import-outside-toplevel
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    own, kept = os.environ.get("MLA_TEST_OWN") == "1", os.environ.get("MLA_TEST_KEPT")
    for name in () if own else ("CPU_MLA", "AMX_MLA"):
        if name != kept and name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], BACKEND)
    if hasattr(CpuPlatform, "mla_before"):
        return
    CpuPlatform.mla_before = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        kept, caching = {name: getattr(scheduler, name) for name in KEPT}, (
            cache.enable_prefix_caching)
        CpuPlatform.mla_before(cls, vllm_config)
        cache.enable_prefix_caching = caching
        for name, value in () if own else kept.items():
            setattr(scheduler, name, value)
        scheduler.async_scheduling = os.environ.get("MLA_TEST_ASYNC") == "1"

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    _make_room()


def _make_room():
    """Makes room for the tensors of the previous stage."""
    # pylint: disable=import-outside-toplevel
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    before = CPUModelRunner.load_model

    def load_model(self, *args, **kwargs):
        before(self, *args, **kwargs)
        if not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device)

    CPUModelRunner.load_model = load_model
