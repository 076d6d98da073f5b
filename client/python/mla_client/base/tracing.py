"""The trace that calls and steps of this process belong to: W3C Trace Context.

With OpenTelemetry in the process its current span is the parent of what the server records; nothing
has to be configured, and OpenTelemetry is never imported here. Other tracers say which span is
current by `set_source`. Threading: any thread.
"""

from __future__ import annotations

import sys
from typing import Callable, Optional, Tuple

_source: Optional[Callable[[], str]] = None


def set_source(source: Optional[Callable[[], str]]) -> None:
    """From now on `source()` gives the `traceparent` of the calling thread, or "". None: that of
    OpenTelemetry."""
    global _source  # pylint: disable=global-statement
    _source = source


def traceparent() -> str:
    """The header `traceparent` of the current span; "" without one."""
    if _source is not None:
        return _source()
    trace = sys.modules.get("opentelemetry.trace")
    current = sys.modules.get("opentelemetry.context")
    if trace is None or (current is not None and not current.get_current()):
        return ""  # none of it, or nothing in its context
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def metadata() -> Tuple[Tuple[str, str], ...]:
    """The metadata that sends it with a call."""
    header = traceparent()
    return (("traceparent", header),) if header else ()
