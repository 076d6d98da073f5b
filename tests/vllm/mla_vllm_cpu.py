"""Restores settings that vLLM's CPU platform changes, in every process of the engine. This is an
entry point of vllm.general_plugins, next to the package's own.

For MLA the platform selects only CPU_MLA and AMX_MLA: here CUSTOM, too, where it is asked for. The
platform turns asynchronous scheduling off. On machines without AMX it also turns off chunked
prefill with its limit of tokens, and prefix caching. All of these get the case's values again. In
addition, later stages of a pipeline get the buffers for the previous stage's tensors, because vLLM
makes them only in a run that eager mode omits. Ranks that share out experts exchange rows of
different numbers and compute some experts each, which vLLM does on GPUs alone.
"""

import inspect
import os

KEPT = ("enable_chunked_prefill", "max_num_batched_tokens")


def register():
    """Called by vLLM after the package's own register."""
    if os.environ.get("VLLM_TARGET_DEVICE") != "cpu":
        return
    # pylint: disable=import-outside-toplevel
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    own = os.environ.get("MLA_TEST_OWN") == "1"
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

    select = CpuPlatform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(cls, selected_backend, *args, **kwargs):
        if selected_backend == AttentionBackendEnum.CUSTOM:
            return selected_backend.get_path()
        return select(cls, selected_backend, *args, **kwargs)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    _make_room()
    _exchange_rows()
    _share_out_experts()


def _exchange_rows():
    """Gives the communicator of CPUs the two exchanges that experts need, over gloo, whose own
    ones want equal numbers of rows."""
    # pylint: disable=import-outside-toplevel
    import torch
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def gathered(self, part, sizes):
        padded = part.new_zeros(max(sizes), *part.shape[1:])
        padded[:len(part)] = part
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=self.device_group)
        return torch.cat([one[:size] for one, size in zip(parts, sizes)])

    def all_gatherv(self, input_, dim=0, sizes=None):
        assert dim == 0
        many = isinstance(input_, list)
        found = [gathered(self, part, sizes or [len(part)] * self.world_size)
                 for part in (input_ if many else [input_])]
        return found if many else found[0]

    def reduce_scatterv(self, input_, dim=-1, sizes=None):
        assert dim == 0
        total = input_.clone()
        torch.distributed.all_reduce(total, group=self.device_group)
        sizes = sizes or [len(total) // self.world_size] * self.world_size
        return total.split(sizes)[self.rank_in_group].clone()

    def reduce_scatterv_into_output(self, input_, output, dim=-1, sizes=None):
        return output.copy_(reduce_scatterv(self, input_, dim, sizes))

    for function in (all_gatherv, reduce_scatterv, reduce_scatterv_into_output):
        setattr(CpuCommunicator, function.__name__, function)


def _share_out_experts():
    """Lets the kernel of CPUs leave out the experts of other ranks: it takes the numbers of all
    experts for those of its own."""
    # pylint: disable=import-outside-toplevel
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    experts, compute = cpu_moe.CPUUnquantizedExperts, cpu_moe.cpu_fused_moe
    apply, maps = experts.apply, []

    def apply_mapped(*args, **kwargs):
        maps.append(inspect.signature(apply).bind(*args, **kwargs).arguments["expert_map"])
        try:
            return apply(*args, **kwargs)
        finally:
            maps.pop()

    def compute_mapped(*args, **kwargs):
        bound = inspect.signature(compute).bind(*args, **kwargs)
        given = bound.arguments
        if maps and maps[-1] is not None:
            own = maps[-1][given["topk_ids"].long()]  # -1: of another rank
            given["topk_weights"] = given["topk_weights"].masked_fill(own < 0, 0)
            given["topk_ids"] = own.clamp(min=0).to(given["topk_ids"].dtype)
        return compute(*bound.args, **bound.kwargs)

    experts.apply, cpu_moe.cpu_fused_moe = apply_mapped, compute_mapped


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
