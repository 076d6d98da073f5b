"""Timeouts as callers give them.

A timeout is a number of seconds. `float("inf")` means that the caller waits for as long as it
takes: it becomes LONGEST_S, which every clock, socket and lock here can add to its own time.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

from mla_client import errors

LONGEST_S = 1e9  # 31 years; threading.TIMEOUT_MAX is larger
# Sockets count milliseconds in 31 bits.
LONGEST_SOCKET_S = 1e6


def checked(name: str, seconds: Any) -> float:
    """The timeout as a finite number. InvalidArgument unless it is a number of at least 0."""
    if (isinstance(seconds, bool) or not isinstance(seconds, numbers.Real)
            or math.isnan(seconds) or seconds < 0):
        raise errors.InvalidArgument(
            f"{name}: got {seconds!r}, must be a number of seconds, or float('inf')",
            errors.ErrorDetail(field=name, got=repr(seconds), limit="a number of seconds"))
    return min(float(seconds), LONGEST_S)
