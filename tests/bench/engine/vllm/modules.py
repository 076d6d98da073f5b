"""Where the thread of an engine spends a pass: in which of the model's modules, and in attention's
call to the server. Used by engine.py."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Dict, Iterator, List

from torch.nn.modules import module as hooks

ATTEND, LAYER, REST = "attend", "layer", "rest"


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
    from mla_client.vllm.runtime import Runtime

    watch = _Watch()
    parts: Dict[str, List[float]] = {}
    attend, step = Runtime.attend, engine.step

    def attended(*args: Any, **kwargs: Any) -> None:
        watch.begin(ATTEND)
        attend(*args, **kwargs)
        watch.end()

    def stepped() -> Any:
        watch.begin(REST)
        try:
            return step()
        finally:
            watch.end()
    handles = [hooks.register_module_forward_pre_hook(watch.enter),
               hooks.register_module_forward_hook(watch.end)]
    Runtime.attend, engine.step = attended, stepped  # type: ignore[method-assign]
    try:
        yield parts
    finally:
        Runtime.attend, engine.step = attend, step  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()
        for one in watch.passes:
            for name, seconds in one.items():
                parts.setdefault(name, []).append(seconds)
