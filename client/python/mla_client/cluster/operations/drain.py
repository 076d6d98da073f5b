"""Emptying a server: its sequences go to the others, each to the one with the most room.

The server that drains chooses. The registry gets each sequence's new server, for workers that ask
when the old one has ended.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List

from mla_client import errors
from mla_client.cluster.members import Member
from mla_client.cluster.registry import EtcdRegistry, Registry
from mla_client.gen import admin_pb2

# Tombstones stay as long as the longest lease that a server grants.
TOMBSTONE_S = 3600
MOST_PEERS = 16


def peers_of(members: List[Member], server: str) -> List[str]:
    """Where sequences may go, the emptiest first."""
    others = [one for one in members if one.address != server and not one.draining]
    others.sort(key=lambda one: (-one.bytes_free, one.address))
    return [one.address for one in others[:MOST_PEERS]]


def drain(source: Registry, connect: Callable[[str], Any], server: str, *, deadline_ms: int = 0,
          exit: bool = False, say: Callable[[str], None] = lambda text: None) -> int:
    """Returns how many sequences with rows are left there. With `exit` the process ends if none
    are. `connect` makes an operator's client of an address; all servers need TLS. If the registry
    does not take where sequences have moved, raises its first error after all was said."""
    peers = peers_of(source.read(), server)
    if not peers:
        raise errors.FailedPrecondition(f"drain: no other member takes what {server} has")
    with connect(server) as client:
        reply = client.drain(deadline_ms, exit, peers)
    moved: Dict[str, List[int]] = {}
    remaining = 0
    for one in reply.handed_over:
        if one.outcome == admin_pb2.HAND_OVER_OUTCOME_MOVED:
            # A server that knows one peer alone does not say which.
            moved.setdefault(one.peer or peers[0], []).append(one.sequence_id)
        elif one.rows > 0:
            remaining += 1
    failed = None
    for peer, sequence_ids in moved.items():
        say(f"{peer}: {len(sequence_ids)} sequences have moved")
        try:
            _write_down(source, sequence_ids, peer)
        except errors.MlaError as error:
            say(f"{peer}: the registry did not take the places of all of these: {error.message}")
            failed = failed or error
    for asked in reply.peers:
        if asked.reason:
            say(asked.message)
    say(f"{remaining} sequences are left")
    if failed is not None:
        raise failed
    return remaining


def _write_down(source: Registry, sequence_ids: List[int], peer: str) -> None:
    if not isinstance(source, EtcdRegistry):
        return
    lease = source.grant(TOMBSTONE_S)
    for sequence_id in sequence_ids:
        source.put(f"moved/{sequence_id:016x}", peer, lease)
