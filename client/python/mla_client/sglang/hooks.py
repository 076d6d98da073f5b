"""Functions that SGLang's registry of hooks calls around its own, in an engine that has chosen the
backend. Each gets the original function, then the arguments of that function."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, List

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, release_req
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.runtime_context import attention_backends

from mla_client import errors
from mla_client.sglang import NAME
from mla_client.sglang.runtime import runtime

# Tokens that an engine plans with at most, whatever the server's pool has room for.
MAX_TOKENS = 1 << 24
UNAVAILABLE = 503  # of HTTP


def chosen() -> bool:
    """True in an engine with this backend."""
    try:
        return NAME in attention_backends()
    except ValueError:  # nothing is published in this process
        return False


def look_first(load: Callable, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """A server that is not there shows before the model is loaded."""
    runtime.look(runner)
    return load(runner, *args, **kwargs)


def need_no_bytes(profile: Callable, configurator: Any, *args: Any, **kwargs: Any) -> int:
    """Weights may take all of the engine's memory: the pool takes none, and is not sized by it."""
    return 0


def size_pool(calculate: Callable, configurator: Any, available_bytes: int, page_size: int) -> Any:
    """As many tokens as the server's pool has room for: none of the engine's memory is taken."""
    tokens = min(runtime.rows_of_pool(), MAX_TOKENS) // page_size * page_size
    return configurator.calculate_pool_sizes_from_max_tokens(tokens, page_size)


def create_no_buffers(create: Callable, pool: Any) -> Any:
    """One row of memory, which stands for all rows of all layers; nothing is written there."""
    if type(pool) is not MLATokenToKVPool:
        raise errors.Unimplemented(f"a KV pool of type {type(pool).__name__}")
    row = torch.zeros((1, 1, pool.kv_cache_dim), dtype=pool.store_dtype, device=pool.device)
    pool.kv_buffer = [row.expand(pool.size + pool.page_size, 1, -1)] * pool.layer_num
    return None


def match(init: Callable, req: Any, tree_cache: Any = None, *args: Any, **kwargs: Any) -> Any:
    """After the engine has matched a request's tokens with its tree: the server's answer counts."""
    result = init(req, tree_cache, *args, **kwargs)
    if tree_cache is not None:
        runtime.place(req, tree_cache)
    return result


def admit(add: Callable, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """A request for which the server has no room waits."""
    if runtime.requests is not None and runtime.requests.waits(req.rid):
        return AddReqResult.NO_TOKEN
    return add(adder, req, *args, **kwargs)


def release(free: Callable, pool: Any, req: Any) -> Any:
    """A request that has ended, or was put back, gives its rows back at once."""
    result = free(pool, req)
    runtime.freed(req)
    return result


def begin_again(process: Callable, scheduler: Any, batch: Any, result: Any) -> Any:
    """Handles requests whose rows the server has lost, which makes their results invalid. They
    begin again, like requests that SGLang puts back for lack of memory, or fail. The overlap
    scheduler has launched one more pass of them already: they are put back after that."""
    requests, processor = runtime.requests, scheduler.batch_result_processor
    if requests is None:
        return process(scheduler, batch, result)
    ready, runtime.put_out = runtime.put_out, []
    lost, again = set(requests.lost([req.rid for req in batch.reqs])), []
    patient = bool(lost) and requests.patient
    for index, req in enumerate(batch.reqs):
        if req.rid not in lost:
            continue
        if patient and req.inflight_middle_chunks > 0 and not _asks(result, index):
            continue  # SGLang has planned a prompt's next pass: it begins again after its last one
        requests.leave(req.rid)
        if patient and _can_repeat(scheduler, result, index, req):
            again.append(req)
            req.is_retracted = True
        else:
            req.discard_output_reason = req.to_finish = FINISH_ABORT(
                f"mla-server: {requests.reason}", UNAVAILABLE, "ServiceUnavailable")
    if again:
        # With overlap a processor skips new tokens of requests that were put back, which it needs
        # not do for SGLang itself where passes do not overlap. Its fields cannot be changed.
        scheduler.batch_result_processor = dataclasses.replace(processor, enable_overlap=True)
    try:
        processed = process(scheduler, batch, result)
    finally:
        scheduler.batch_result_processor = processor
    if scheduler.enable_overlap and scheduler.result_queue:
        runtime.put_out = again
    else:
        ready = ready + again
    for req in ready:
        _put_back(scheduler, req)
    if again:
        _leave_out(scheduler, batch, again)
    return processed


def _asks(result: Any, index: int) -> bool:
    """True if results of a request of a pass include its prompt's own tokens. They cannot be left
    out, because those of others lie after them."""
    ends, begins = (getattr(result, name, None) for name in (
        "extend_input_len_per_req", "extend_logprob_start_len_per_req"))
    return bool(ends and begins and ends[index] > begins[index])


def _can_repeat(scheduler: Any, result: Any, index: int, req: Any) -> bool:
    """True if a request of a pass may begin again: its results can be left out, and it is in no
    pass to come. With overlap it is in the running batch then."""
    return (not _asks(result, index) and req.inflight_middle_chunks <= 0
            and (not scheduler.enable_overlap or req in scheduler.running_batch.reqs))


def _leave_out(scheduler: Any, batch: Any, again: List[Any]) -> None:
    """Takes requests out of the batches of which SGLang makes the next pass. With overlap `batch`
    is a copy, and else it may be the running one."""
    running = scheduler.running_batch
    for one in (running,) if scheduler.enable_overlap or batch is running else (running, batch):
        one.filter_batch(reqs_to_exclude=again)
    running.batch_is_full = False


def _put_back(scheduler: Any, req: Any) -> None:
    """Queues a request whose passes are over."""
    if req.finished() or not req.kv.holds_kv:
        return
    release_req(req=req, remaing_req_count=1, req_to_token_pool=scheduler.req_to_token_pool,
                token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
                tree_cache=scheduler.tree_cache, hisparse_coordinator=None, offload_kv=False)
    scheduler._add_request_to_queue(req, is_retracted=True)
