"""Bytes that a model chose, as text for a client."""

from __future__ import annotations

import codecs
from typing import Sequence, Tuple


class StopFilter:
    """Passes bytes on, up to the first stop string; what may become one is kept back."""

    def __init__(self, stops: Sequence[bytes]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._kept = b""

    def add(self, data: bytes) -> Tuple[bytes, bool]:
        """Returns the bytes that may be shown now, and True if a stop string was found."""
        self._kept += data
        found = [at for at in (self._kept.find(stop) for stop in self._stops) if at >= 0]
        if found:
            shown, self._kept = self._kept[:min(found)], b""
            return shown, True
        most = min(len(self._kept), max((len(stop) for stop in self._stops), default=1) - 1)
        for length in range(most, 0, -1):
            if any(stop.startswith(self._kept[-length:]) for stop in self._stops):
                break
        else:
            length = 0
        cut = len(self._kept) - length
        shown, self._kept = self._kept[:cut], self._kept[cut:]
        return shown, False

    def rest(self) -> bytes:
        """The bytes kept back, at the end."""
        shown, self._kept = self._kept, b""
        return shown


class Utf8:
    """Text of bytes that come one by one; a character is shown when it is whole."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes, last: bool = False) -> str:
        """Text of the next bytes; after the `last` ones also of incomplete characters."""
        return self._decoder.decode(data, last)
