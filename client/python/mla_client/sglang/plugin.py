"""The entry point of `sglang.srt.plugins`: SGLang calls it in every process. It only names the
backend and the hooks; an engine that does not ask for the backend stays as it is."""

from __future__ import annotations

import logging
from typing import Any, Callable, Dict, List

from mla_client import errors
from mla_client.serving import Release, check_version
from mla_client.sglang import NAME

LOG = logging.getLogger("mla_client")
# Releases that were run; docs/clients/sglang.md says how.
RELEASES = (Release((0, 5, 23), (0, 5, 23)),)
# By target in `sglang.srt` the function of mla_client.sglang.hooks that goes around it.
HOOKS: Dict[str, str] = {
    "model_executor.model_runner.ModelRunner.load_model": "look_first",
    "mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes": "need_no_bytes",
    "model_executor.pool_configurator.DefaultPoolConfigurator.calculate_pool_sizes": "size_pool",
    "mem_cache.memory_pool.MLATokenToKVPool._create_buffers": "create_no_buffers",
    "mem_cache.memory_pool.ReqToTokenPool.free": "release",
    "managers.schedule_batch.Req.init_next_round_input": "match",
    "managers.schedule_policy.PrefillAdder.add_one_req": "admit",
    "managers.scheduler.Scheduler.process_batch_result": "begin_again",
}


def register() -> None:
    """Makes `--attention-backend mla_server` known. In another release of SGLang the backend
    refuses, with the reason, when it is asked for."""
    # pylint: disable=import-outside-toplevel
    from sglang.srt.layers.attention.attention_registry import (ATTENTION_BACKENDS,
                                                                register_attention_backend)
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.version import __version__

    create = _create
    try:
        check_version("SGLang", __version__, RELEASES)
    except errors.Unimplemented as error:
        LOG.warning("mla: %s", error)
        create = _refusing(error)
    else:
        _register_hooks()
    known = ATTENTION_BACKENDS.get(NAME)
    if known is not None and getattr(known, "__module__", "") != __name__:
        raise RuntimeError(f"attention backend {NAME} is registered already, as {known}")
    register_attention_backend(NAME)(create)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def hooks_missing() -> List[str]:
    """Targets around which SGLang has not put a hook; it only logs why."""
    # pylint: disable=import-outside-toplevel
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [target for target in map(_target, HOOKS) if target not in HookRegistry._patched]


def _target(name: str) -> str:
    return f"sglang.srt.{name}"


def _register_hooks() -> None:
    # pylint: disable=import-outside-toplevel
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, function in HOOKS.items():
        HookRegistry.register(_target(target), _lazy(function), HookType.AROUND)


def _lazy(function: str) -> Callable:
    """A hook whose module, with torch and the client, is imported when it is called first."""
    def hook(original: Callable, *args: Any, **kwargs: Any) -> Any:
        # pylint: disable=import-outside-toplevel
        from mla_client.sglang import hooks

        if not hooks.chosen():
            return original(*args, **kwargs)
        return getattr(hooks, function)(original, *args, **kwargs)
    return hook


def _refusing(error: errors.MlaError) -> Callable:
    def refuse(runner: Any) -> Any:
        raise error.again()
    return refuse


def _create(runner: Any) -> Any:
    """The backend of a model runner."""
    # pylint: disable=import-outside-toplevel
    from mla_client.sglang.backend import RemoteMlaBackend

    return RemoteMlaBackend(runner)
