"""Connectors of targets that name more than one server.

A package that has such a client registers it here, so that Client.connect needs no import of it.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Tuple

Connector = Callable[..., Any]
_CONNECTORS: List[Tuple[Callable[[str], bool], Connector]] = []


def register(names: Callable[[str], bool], connect: Connector) -> None:
    """From now on targets for which `names` returns True are connected by `connect`, which takes
    the arguments of Client.connect."""
    _CONNECTORS.append((names, connect))


def connector_of(target: str) -> Optional[Connector]:
    """Returns the connector of a target, or None for the address of one server."""
    return next((connect for names, connect in _CONNECTORS if names(target)), None)
