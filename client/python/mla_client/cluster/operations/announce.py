"""Keeps a server in the registry (etcd): one such process runs next to each server.

    python3 -m mla_client.cluster announce --registry etcd://etcd-0:2379/fleet \\
        --target unix:/run/mla-server/0.sock --address node-3:50551

The server itself opens no connections. The entry in the registry ends LEASE_S after this process,
its host or its network has failed, and at once when the server does not answer or this is stopped.
"""

from __future__ import annotations

import re
import socket
import threading
from typing import Any, Callable, Optional

from mla_client import errors
from mla_client.cluster.members import MOST_DIGESTS, MOST_TEXT, Member
from mla_client.cluster.placement import Probe
from mla_client.cluster.registry import EtcdRegistry
from mla_client.connection.targets import unix_path_of
from mla_client.types import Prefix

# The registry forgets a server after so long without news of it; news come so often.
LEASE_S = 4
PERIOD_S = 1.0
# A server that does not answer within this time is removed from the registry.
ANSWER_S = 2.0
# Turns between two questions for device, version and models, which seldom change.
SELDOM = 10


def _shown(text: str) -> str:
    """Returns `text` as a registry accepts it: printable and at most MOST_TEXT long."""
    return "".join(c for c in text if c.isprintable())[:MOST_TEXT]


class Announcer:
    """Announces one server to the registry. Belongs to one thread."""

    def __init__(self, registry: EtcdRegistry, connect: Callable[[], Any], address: str,
                 target: str = "", node: str = "") -> None:
        """`connect` makes a client of the server; `address` is how others reach it."""
        self._registry = registry
        self._connect = connect
        self._address = address
        self._socket = unix_path_of(target)
        self._node = node or socket.gethostname()
        self._client: Any = None
        self._lease: Any = None
        self._turn = 0
        self._seldom: dict = {}
        self.said: Optional[Member] = None  # what the registry has

    @property
    def name(self) -> str:
        """The key, below the fleet's prefix."""
        return "servers/" + re.sub(r"[^A-Za-z0-9_.\-]", "_", self._address)

    def turn(self) -> bool:
        """Asks the server and tells the registry. False where either does not answer: what was
        announced goes with its lease, at the latest."""
        try:
            member = self._ask()
        except errors.MlaError:
            self._leave_server()
            self.withdraw()
            return False
        try:
            if self._lease is not None and not self._registry.refresh(self._lease):
                self._lease = self.said = None
            if self._lease is None:
                self._lease = self._registry.grant(LEASE_S)
            if member != self.said:
                self._registry.put(self.name, member.to_json(), self._lease)
                self.said = member
        except errors.MlaError:
            # Whatever was written may be there or not: it is written again, under another lease.
            self._lease = self.said = None
            return False
        self._turn += 1
        return True

    def withdraw(self) -> None:
        """Takes the server out of the registry."""
        lease, self._lease, self.said = self._lease, None, None
        if lease is None:
            return
        try:
            self._registry.revoke(lease)
        except errors.MlaError:
            pass  # it ends by itself

    def run(self, stop: threading.Event) -> None:
        """Turns until `stop`, then withdraws."""
        try:
            while not stop.is_set():
                self.turn()
                stop.wait(PERIOD_S)
        finally:
            self.withdraw()
            self._leave_server()

    def _ask(self) -> Member:
        if self._client is None:
            self._client = self._connect()
            self._seldom = {}
        if not self._seldom or self._turn % SELDOM == 0:
            info = self._client.server_info()
            digests = {spec.weights_digest.hex() for spec in self._client.models()}
            self._seldom = {"device": _shown(info.backend.device or info.backend.name),
                            "version": _shown(info.server_version),
                            "models": tuple(sorted(digests - {""}))[:MOST_DIGESTS]}
        probe = self._probe()
        return Member.checked({
            "address": self._address, "boot_id": probe.boot_id, "node": self._node,
            "socket": self._socket, "draining": probe.draining, "bytes_free": probe.bytes_free,
            "bytes_cached": probe.bytes_cached, "bytes_total": probe.bytes_total,
            "sequences": probe.sequences, **self._seldom})

    def _probe(self) -> Probe:
        try:
            answer: Probe = self._client._probe("", Prefix(), ANSWER_S)()
            return answer
        except errors.Unimplemented:  # a release that cannot be probed: its counters say the same
            stats = self._client.stats()
            return Probe(boot_id=stats.boot_id, bytes_total=stats.kv_bytes_total,
                         bytes_free=max(0, stats.kv_bytes_total - stats.kv_bytes_used),
                         sequences=stats.sequences)

    def _leave_server(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            try:
                client.close()
            except (errors.MlaError, ValueError):
                pass  # it was broken
