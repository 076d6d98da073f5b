"""Bounds of tenants over a fleet: one process at a time reads what each server's tenants use and
sets each server's bounds, so that they sum up to the fleet's.

    share of a server = what the tenant uses there + its part of what no tenant uses

Bounds that fall are set before others rise, and a server that does not answer keeps what it was
given. So the sum is never more than the fleet's bound, unless a tenant used more than that before,
or this process has just begun to lead and a server does not answer that has bounds of the former
leader: it counts for nothing until it answers.
A server that was started again has lost its bounds, and gets them again. One that has left the
fleet keeps its share for LEFT_S: it may go on for clients that still know it.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Protocol, Tuple

from mla_client import errors
from mla_client.cluster.members import KEEP_S
from mla_client.cluster.registry import EtcdRegistry

PERIOD_S = 5.0
LEADER = "quotas/leader"
LEADER_LEASE_S = 15
# A turn renews the lease so often, which leaves a call to a server enough time to end.
RENEW_S = 5.0
LEFT_S = KEEP_S  # for which clients use a list of members without news of the registry
MOST_TENANTS = 4096
MOST_BOUND = 2**63 - 1


def shares(total: int, used: Mapping[str, int], kept: Mapping[str, int] = {}) -> Dict[str, int]:
    """Returns each server's bound, by address; their sum is `total`, unless more is in use. `used`:
    the tenant's use of each server that answers; `kept`: the bounds of the others, which stay."""
    if not used:
        return {}
    remaining = max(0, total - sum(kept.values()))
    taken = sum(used.values())
    if taken >= remaining:  # no server gets more; what is in use is not taken away
        return dict(used)
    free, count = remaining - taken, len(used)
    return {address: amount + free // count + (place < free % count)
            for place, (address, amount) in enumerate(sorted(used.items()))}


def changes(before: Mapping[str, int], after: Mapping[str, int]) -> List[Tuple[str, int]]:
    """Returns the bounds to set. Bounds that fall come first."""
    new = [(address, bound) for address, bound in after.items() if before.get(address) != bound]
    return sorted(new, key=lambda one: one[1] - before.get(one[0], MOST_BOUND))


@dataclasses.dataclass(frozen=True)
class FleetQuotas:
    """Bounds of tenants in the whole fleet, by tenant and resource."""

    bounds: Dict[str, Dict[str, int]]

    @classmethod
    def from_json(cls, text: str) -> "FleetQuotas":
        """{"tenant": {"kv_bytes": 1000, ...}, ...}. InvalidArgument names what is wrong."""
        try:
            given = json.loads(text)
        except ValueError as error:
            raise errors.InvalidArgument(f"quotas: {error}") from error
        if not isinstance(given, dict) or len(given) > MOST_TENANTS:
            raise errors.InvalidArgument(
                f"quotas: must be an object of at most {MOST_TENANTS} tenants")
        for tenant, bounds in given.items():
            good = isinstance(bounds, dict) and all(
                isinstance(bound, int) and not isinstance(bound, bool) and 0 <= bound <= MOST_BOUND
                for bound in bounds.values())
            if not good:
                raise errors.InvalidArgument(
                    f"quotas.{tenant}: got {bounds!r:.200}, must be numbers by resource",
                    errors.ErrorDetail(field=f"quotas.{tenant}"))
        return cls(given)


class Leader(Protocol):
    """Lets one process at a time lead."""

    def held(self) -> bool:
        """Takes or keeps it. False while another process has it, or it cannot be known."""

    def leave(self) -> None:
        """Lets another process have it."""


class Term:
    """The time in which this process alone leads. Belongs to one thread."""

    def __init__(self, leader: Leader, now: Callable[[], float]) -> None:
        """Takes or keeps the leadership."""
        self._leader = leader
        self._now = now
        self._renewed = now()
        self._lasts = leader.held()

    def lasts(self) -> bool:
        """Renews the lease if it is time to. Returns false once another process may have led."""
        asked = self._now()
        if self._lasts and asked - self._renewed >= RENEW_S:
            held = self._leader.held()
            # Held may also mean that the lease had ended and was taken again.
            self._lasts = held and self._now() - self._renewed < LEADER_LEASE_S
            self._renewed = asked
        return self._lasts


class Reconciler:
    """Sets the bounds. Belongs to one thread."""

    def __init__(self, quotas: FleetQuotas, clients: Callable[[], Mapping[str, Any]],
                 now: Callable[[], float] = time.monotonic) -> None:
        """`clients` makes or keeps an operator's connection to each member, by address; None: it
        does not answer."""
        self._quotas = quotas
        self._clients = clients
        self._now = now
        self._lasts: Callable[[], bool] = lambda: True
        self._set: Dict[Tuple[str, str], Dict[str, int]] = {}  # by tenant and resource
        self._left: Dict[str, float] = {}  # servers that were members, since when they are not
        self.failed: Dict[str, errors.MlaError] = {}  # servers, in the latest turn

    def turn(self, leader: Optional[Leader] = None) -> int:
        """Reads and sets once; returns how many bounds were changed. The turn ends early when
        `leader` may have lost the leadership: what was read may be old then."""
        self.failed, usage = {}, {}
        members = self._clients()
        # Only now: to connect to servers that do not answer can take longer than a lease.
        self._lasts = (lambda: True) if leader is None else Term(leader, self._now).lasts
        self._forget(members)
        clients = {address: one for address, one in members.items() if one is not None}
        for address, client in clients.items():
            if not self._lasts():
                return 0
            try:
                tenants, _ = client.quotas()
                usage[address] = {one.tenant: one.resources for one in tenants}
            except errors.MlaError as error:
                self.failed[address] = error
        changed = 0
        for tenant, bounds in self._quotas.bounds.items():
            for resource, total in bounds.items():
                used = {}
                before = self._set.setdefault((tenant, resource), {})
                for address, of_tenants in usage.items():
                    entry = of_tenants.get(tenant, {}).get(resource)
                    used[address] = entry.used if entry is not None else 0
                    if entry is not None and entry.source == "runtime":
                        before[address] = entry.bound
                    else:
                        before.pop(address, None)
                kept = {address: bound for address, bound in before.items()
                        if address not in used}
                changed += self._apply(clients, tenant, resource, before,
                                       shares(total, used, kept))
        return changed

    def _forget(self, members: Mapping[str, Any]) -> None:
        """Lets the others have the shares of servers that have left the fleet."""
        known = {address for bounds in self._set.values() for address in bounds}
        self._left = {address: self._left.get(address, self._now())
                      for address in known if address not in members}
        for address, since in self._left.items():
            if self._now() - since >= LEFT_S:
                for bounds in self._set.values():
                    bounds.pop(address, None)

    def _apply(self, clients: Mapping[str, Any], tenant: str, resource: str,
               before: Dict[str, int], after: Mapping[str, int]) -> int:
        changed = 0
        for address, bound in changes(before, after):
            if not self._lasts():
                return changed
            try:
                clients[address].set_quota(tenant, {resource: bound})
            except errors.MlaError as error:
                self.failed[address] = error
                if bound < before.get(address, MOST_BOUND):
                    return changed  # what did not fall is not given to others
                continue
            before[address] = bound
            changed += 1
        return changed


class Leadership:
    """A Leader by etcd: the one that leads holds a key under a lease."""

    def __init__(self, registry: EtcdRegistry, name: str) -> None:
        self._registry = registry
        self._name = name
        self._lease: Any = None

    def held(self) -> bool:
        """Takes or keeps it. False while another process has it, or the registry is away."""
        try:
            if self._lease is not None and self._registry.refresh(self._lease):
                return True
            self._lease = None
            lease = self._registry.grant(LEADER_LEASE_S)
            if self._registry.create(LEADER, self._name, lease):
                self._lease = lease
                return True
            self._registry.revoke(lease)
        except errors.MlaError:
            self._lease = None
        return False

    def leave(self) -> None:
        """Lets another process have it."""
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                self._registry.revoke(lease)
            except errors.MlaError:
                pass  # it ends by itself


def run(reconciler: Reconciler, leadership: Leader, stop: threading.Event,
        report: Optional[Callable[[int, Dict[str, errors.MlaError]], None]] = None) -> None:
    """Turns every PERIOD_S while this process leads, until `stop`."""
    try:
        while not stop.is_set():
            if leadership.held():
                changed = reconciler.turn(leadership)
                if report is not None:
                    report(changed, reconciler.failed)
            stop.wait(PERIOD_S)
    finally:
        leadership.leave()
