"""Which parts of a stretch of memory are taken: first fit, neighbours joined when given back."""

from __future__ import annotations

from typing import Dict, Optional


class Blocks:
    """Blocks by offset. Threading: the owner's lock."""

    def __init__(self, offset: int, size: int) -> None:
        self._free: Dict[int, int] = {offset: size}  # offset -> bytes
        self.used: Dict[int, int] = {}

    def take(self, wanted: int) -> Optional[int]:
        """Takes `wanted` bytes and returns their offset; None if no free block is large enough."""
        for offset, there in self._free.items():
            if there >= wanted:
                break
        else:
            return None
        del self._free[offset]
        if there > wanted:
            self._free[offset + wanted] = there - wanted
        self.used[offset] = wanted
        return offset

    def give(self, offset: int) -> None:
        """Gives a block back."""
        size = self.used.pop(offset)
        # Neighbours are joined, so that large tensors find room again.
        size += self._free.pop(offset + size, 0)
        for before, there in self._free.items():
            if before + there == offset:
                self._free[before] = there + size
                return
        self._free[offset] = size
