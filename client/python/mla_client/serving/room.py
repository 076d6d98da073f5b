"""The pool's room, as far as a pass may count on it without asking the server."""

from __future__ import annotations

import time
from typing import Any, Callable, List, Tuple

from mla_client import errors
from mla_client.service import Model, Sequence
from mla_client.serving.link import Link

# The pool's room is asked for again after this long.
ROOM_S = 1.0


class Room:
    """Page groups that were free a moment ago, less those that passes have taken since. Belongs to
    one thread at a time."""

    def __init__(self, link: Link, failed: Callable[[Exception], Any]) -> None:
        """`failed` is told what a call has raised."""
        self._link = link
        self._failed = failed
        self._asked = -ROOM_S
        self._groups = 0

    def take(self, entries: List[Tuple[Sequence, int]]) -> bool:
        """Counts the groups that new rows of these sequences need as taken. Returns True if there
        is room for them. Asks the server if that was not done lately, or there seems to be none."""
        model = entries[0][0].model
        page = model.spec.page_size or 1
        need = sum(-(-(sequence.length + rows) // page) - -(-sequence.length // page)
                   for sequence, rows in entries)
        if need > self._groups or time.monotonic() - self._asked > ROOM_S:
            self._groups = self._free(model)
            self._asked = time.monotonic()
        self._groups -= need
        return self._groups >= 0

    def _free(self, model: Model) -> int:
        """Half of the page groups that the pool has free: others take some, too."""
        try:
            stats = self._link.client.stats()
        except (errors.MlaError, ValueError) as error:  # gRPC's own after a close is a ValueError
            self._failed(error)
            return 0
        total = stats.kv_bytes_total // max(1, model.page_group_bytes)
        free: int = total - stats.page_groups_used + stats.page_groups_cached
        return free // 2
