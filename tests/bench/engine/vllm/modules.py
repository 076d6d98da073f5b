"""Where the thread of an engine spends a pass: in which of the model's modules, in attention's call
to the server, and in the C library of that. Used by engine.py."""

from __future__ import annotations

import contextlib
import gc
import time
from typing import Any, Callable, Dict, Iterator, List

from torch.nn.modules import module as hooks

ATTEND, LAYER, LIBRARY, REST = "attend", "layer", "library", "rest"


class _Watch:
    """Takes the time of each part of a pass without the parts in it. Parts of one name are summed:
    modules are called by the last part of their names, which all layers have. Belongs to one
    thread."""

    def __init__(self) -> None:
        self.passes: List[Dict[str, float]] = []
        self._sums: Dict[str, float] = {}
        self._names: Dict[int, str] = {}  # by id of a module, which the model keeps
        self._open: List[List[Any]] = []  # name, begin, seconds of the parts in it

    def enter(self, module: Any, *_: Any) -> None:
        """A module is called."""
        name = self._names.get(id(module))
        if name is None:
            for path, one in module.named_modules():
                last = path.rsplit(".", 1)[-1]
                self._names[id(one)] = LAYER if last.isdigit() else last or type(one).__name__
            name = self._names[id(module)]
        self.begin(name)

    def begin(self, name: str) -> None:
        """A part with that name begins."""
        self._open.append([name, time.perf_counter(), 0.0])

    def watch(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a part with that name."""
        def call(*args: Any, **kwargs: Any) -> Any:
            self.begin(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.end()
        return call

    def end(self, *_: Any) -> None:
        """The part that began last ends; with the outermost one, a pass."""
        name, began, inner = self._open.pop()
        took = time.perf_counter() - began
        self._sums[name] = self._sums.get(name, 0.0) + took - inner
        if self._open:
            self._open[-1][2] += took
        else:
            self.passes.append(self._sums)
            self._sums = {}


@contextlib.contextmanager
def watched(engine: Any) -> Iterator[Dict[str, List[float]]]:
    """Seconds of each pass of vLLM's engine by parts, filled in at the end. All modules of the
    process are watched, which makes each call of one some microseconds longer."""
    # pylint: disable=import-outside-toplevel
    from mla_client.streams.chains import Chain
    from mla_client.vllm.runtime import Runtime

    watch = _Watch()
    parts: Dict[str, List[float]] = {}
    # Chains go on from pass to pass, and keep the library's function.
    watched_ones = [(one, name, part, getattr(one, name)) for one, name, part in (
        (Runtime, "attend", ATTEND), (engine, "step", REST),
        *((one, "_call", LIBRARY) for one in gc.get_objects() if isinstance(one, Chain)))]
    for one, name, part, function in watched_ones:
        setattr(one, name, watch.watch(part, function))
    handles = [hooks.register_module_forward_pre_hook(watch.enter),
               hooks.register_module_forward_hook(watch.end)]
    try:
        yield parts
    finally:
        for one, name, _, function in watched_ones:
            setattr(one, name, function)
        for handle in handles:
            handle.remove()
        for each in watch.passes:
            for name, seconds in each.items():
                parts.setdefault(name, []).append(seconds)
