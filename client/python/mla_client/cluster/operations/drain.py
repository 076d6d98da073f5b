"""Emptying a server: its sequences go to the others, the one with the most room first.

A drain hands sequences over to one peer. Sequences for which that peer has no room go to the next.
The drain is cancelled in between, and the server may take a sequence or two in that moment. They go
with the others. The registry gets each sequence's new server, for workers that ask when the old one
has ended.
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
    are. `connect` makes an operator's client of an address; all servers need TLS."""
    peers = peers_of(source.read(), server)
    if not peers:
        raise errors.FailedPrecondition(f"drain: no other member takes what {server} has")
    left: Dict[int, str] = {}
    with connect(server) as client:
        for turn, peer in enumerate(peers):
            if turn > 0:
                client.cancel_drain()
            last = turn == len(peers) - 1
            try:
                reply = client.drain(deadline_ms, exit, peer)
            except (errors.Unavailable, errors.FailedPrecondition) as error:
                say(f"{peer}: {error}")
                if last:
                    raise
                continue
            moved = [one for one in reply.handed_over
                     if one.outcome == admin_pb2.HAND_OVER_OUTCOME_MOVED]
            left = {one.sequence_id: one.reason for one in reply.handed_over
                    if one.outcome != admin_pb2.HAND_OVER_OUTCOME_MOVED and one.rows > 0}
            _write_down(source, [one.sequence_id for one in moved], peer)
            say(f"{peer}: {len(moved)} sequences have moved, {len(left)} are left")
            if not left:
                break
    return len(left)


def _write_down(source: Registry, sequence_ids: List[int], peer: str) -> None:
    if not isinstance(source, EtcdRegistry) or not sequence_ids:
        return
    lease = source.grant(TOMBSTONE_S)
    for sequence_id in sequence_ids:
        source.put(f"moved/{sequence_id:016x}", peer, lease)
