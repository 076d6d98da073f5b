"""Attaching a model to a service, and what runs as long as it is attached."""

from __future__ import annotations

import inspect
import weakref
from typing import Any, Optional, Tuple

import torch
from transformers.cache_utils import DynamicCache

from mla_client import errors
from mla_client.service import Model, Service
from mla_client.serving.batch import Keeper
from mla_client.transformers import attention, models, projected
from mla_client.transformers.cache import RemoteCache, Rows, is_sparse

# A step lives this long without a message: the time between two layers is the model's own work.
STEP_LEASE_MS = 30_000
# The last step of a pass is ended after that time if nothing follows.
IDLE_S = 1.0
THREAD = "mla-transformers"
# The argument of a forward pass that is the cache. transformers 5.24 gave it the first name, and
# takes the second one from callers until 5.40.
_CACHE_NAMES = ("cache", "past_key_values")
_attached: "weakref.WeakSet[Any]" = weakref.WeakSet()  # models


class Attachment:
    """A model whose attention a service computes, until `detach`. Usable in a `with` block."""

    def __init__(self, model: Any, registered: Model, step_lease_ms: int) -> None:
        self.model = registered  # as the service knows it
        if model in _attached:
            raise errors.FailedPrecondition(f"{type(model).__name__}: it is attached already")
        self._torch_model = model
        self._step_lease_ms = step_lease_ms
        before = model.config._attn_implementation
        # A model loaded with this name has no other attention to return to.
        self._before = "eager" if before in attention.NAMES else before
        self._cache_name = cache_name(model)
        attention.register()
        name = attention.SPARSE_NAME if is_sparse(registered) else attention.NAME
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise errors.Unimplemented(f"{type(model).__name__}: its attention cannot be replaced")
        _attached.add(model)
        self._forwards = projected.replace_forwards(model) if registered.spec.rope_layout else []
        self._keeper = Keeper(THREAD, min(IDLE_S, step_lease_ms / 2e3))
        self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.detach()

    def __repr__(self) -> str:
        return f"<Attachment {self.model.spec.model_id!r}>"

    def cache(self) -> RemoteCache:
        """An empty cache, to pass as `cache`, which was `past_key_values` before transformers 5.24:
        a call of generate() goes on from what another one left. Without it each makes its own."""
        cache = RemoteCache(Rows(self.model, self._step_lease_ms))
        self._keeper.keep(cache, cache.rows)
        return cache

    def detach(self) -> None:
        """The model computes its attention itself again. Repeating is harmless."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._torch_model.set_attn_implementation(self._before)
            projected.restore_forwards(self._forwards)
            _attached.discard(self._torch_model)
            self._keeper.close()

    def _before_forward(self, module: Any, args: Tuple, kwargs: dict) -> Tuple[Tuple, dict]:
        """Gives the pass a cache whose rows are on the server, and tells it the tokens."""
        if len(args) > 1:
            raise errors.InvalidArgument(
                f"forward: got {len(args)} arguments without a name, at most input_ids may be one")
        if kwargs.get("output_attentions"):
            raise errors.Unimplemented("output_attentions: a server returns no attention weights")
        use_cache = kwargs.get("use_cache")
        if not (module.config.use_cache if use_cache is None else use_cache):
            raise errors.Unimplemented("use_cache=False: the rows are in the server's cache")
        past = self._given_cache(kwargs)
        if not isinstance(past, RemoteCache):
            _check_replaceable(past, self._cache_name)
            past = self.cache()
        elif past.rows.model is not self.model:
            raise errors.InvalidArgument(f"{self._cache_name}: the cache is of another model")
        tokens = args[0] if args else kwargs.get("input_ids")
        positions = kwargs.get("position_ids")
        if (tokens is not None and positions is not None and positions.ndim == 2
                and len(positions) == len(tokens)):
            tokens = torch.cat((tokens, positions.to(tokens)), dim=1)
        past.rows.tokens = tokens
        return args, {**kwargs, self._cache_name: past, "use_cache": True}

    def _given_cache(self, kwargs: dict) -> Any:
        """Takes the cache out of the arguments, by the name that the release has or had."""
        given = [name for name in _CACHE_NAMES if kwargs.get(name) is not None]
        if len(given) > 1:
            raise errors.InvalidArgument(f"forward: got {' and '.join(given)}, must be one of them")
        return [kwargs.pop(name, None) for name in given or _CACHE_NAMES[:1]][0]


def cache_name(model: Any) -> str:
    """How the forward pass of a model calls its cache. Unimplemented if it does not take one."""
    parameters = inspect.signature(type(model).forward).parameters
    for name in _CACHE_NAMES:
        if name in parameters:
            return name
    raise errors.Unimplemented(
        f"{type(model).__name__}: its forward pass has no parameter {', '.join(_CACHE_NAMES)}")


def _check_replaceable(past: Any, name: str) -> None:
    """The cache that generate() made, or none: rows of another cache would be missing on the
    server."""
    if past is None:
        return
    if type(past) is not DynamicCache or past.offloading:
        raise errors.Unimplemented(
            f"{name}: got {type(past).__name__}; leave cache_implementation unset, or "
            "pass a cache() of the attachment")
    if past.get_seq_length() > 0 or getattr(past, "_is_user_defined", False):
        raise errors.Unimplemented(
            f"{name}: got a DynamicCache that is to be kept or was filled locally; pass a cache() "
            "of the attachment")


def attach_checked(model: Any, service: Service, model_id: str, kv_format: str, page_size: int,
                   step_lease_ms: int, projects: bool = False, projected_dtype: str = ""
                   ) -> Attachment:
    """Attaches without checking the library."""
    registered = models.register(service, model, models.layers_of(model, projects), model_id,
                                 kv_format, page_size, projected_dtype)
    return Attachment(model, registered, step_lease_ms)
