"""What the harness puts back on vLLM's CPU platform, in every process of the engine: an entry point
of vllm.general_plugins, next to the package's own.

The platform selects CPU_MLA and AMX_MLA alone for MLA, which here are the package's backend; and it
turns asynchronous scheduling off, which MLA_TEST_ASYNC=1 puts back."""

import os

BACKEND = "mla_client.vllm.backend.MlaServerBackend"


def register():
    """Called by vLLM after the package's own register."""
    if os.environ.get("MLA_TEST_OWN") == "1":
        return
    # pylint: disable=import-outside-toplevel
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in ("CPU_MLA", "AMX_MLA"):
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], BACKEND)
    if os.environ.get("MLA_TEST_ASYNC") == "1" and not hasattr(CpuPlatform, "mla_before"):
        CpuPlatform.mla_before = CpuPlatform.check_and_update_config.__func__

        def check_and_update_config(cls, vllm_config):
            CpuPlatform.mla_before(cls, vllm_config)
            vllm_config.scheduler_config.async_scheduling = True

        CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
