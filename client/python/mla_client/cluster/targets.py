"""Targets that name a cluster, and the registry that each of them means.

    etcd://HOST:2379[,HOST:2379...]/PREFIX    leases that `announce` keeps next to each server
    etcds://...                               the same over TLS, with the system's authorities
    dns:///NAME:50551                         every address of a name: a headless service
    a:50551,b:50551                           a list that stays
"""

from __future__ import annotations

import re
from typing import List, NamedTuple, Tuple

from mla_client import errors

ETCD_PORT = 2379
SERVER_PORT = 50551
MOST_STATIC = 1024
MOST_ENDPOINTS = 16
_ETCD = re.compile(r"^(etcds?)://([^/]*)/(.*)$", re.DOTALL)
# In a registry's prefix: the names of other keys must not follow from what a user writes.
_PREFIX = re.compile(r"^[A-Za-z0-9_.\-]+(/[A-Za-z0-9_.\-]+)*$")


class Endpoint(NamedTuple):
    """A host and a port; an IPv6 address without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class EtcdTarget(NamedTuple):
    """Where a fleet's members are registered."""

    endpoints: Tuple[Endpoint, ...]
    prefix: str
    tls: bool


def names_cluster(target: str) -> bool:
    """Returns true for a target of a cluster, false for one of a server."""
    return target.startswith(("etcd://", "etcds://", "dns:///")) or (
        "," in target and not target.startswith(("unix:", "ipv4:", "ipv6:")))


def etcd_target(target: str) -> EtcdTarget:
    """Parses a target of etcd. Raises InvalidArgument with the reason."""
    if "@" in target:
        raise _wrong("etcd://...@...", "without a user: a target is shown in logs")
    parts = _ETCD.match(target)
    if not parts:
        raise _wrong(target, "etcd://HOST:2379/PREFIX")
    endpoints = tuple(endpoint(one, ETCD_PORT, target) for one in parts.group(2).split(","))
    prefix = parts.group(3).rstrip("/")
    if len(endpoints) > MOST_ENDPOINTS:
        raise _wrong(target, f"of at most {MOST_ENDPOINTS} endpoints")
    if not _PREFIX.match(prefix):
        raise _wrong(target, "with a prefix of letters, digits, '_', '.', '-' and '/' between them")
    return EtcdTarget(endpoints, prefix, parts.group(1) == "etcds")


def dns_target(target: str) -> Endpoint:
    """The name whose addresses are the members."""
    return endpoint(target[len("dns:///"):], SERVER_PORT, target)


def static_target(target: str) -> List[str]:
    """The addresses of a list."""
    addresses = [one.strip() for one in target.split(",")]
    if len(addresses) > MOST_STATIC:
        raise _wrong(f"{len(addresses)} addresses", f"at most {MOST_STATIC}")
    if len(set(addresses)) != len(addresses):
        raise _wrong(target, "a list without repeats")
    return [one if one.startswith("unix:") else str(endpoint(one, SERVER_PORT, target))
            for one in addresses]


def endpoint(text: str, port: int, target: str) -> Endpoint:
    """HOST[:PORT], [IPV6][:PORT]."""
    match = re.match(r"^(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9._\-]+))(?::([0-9]{1,5}))?$", text)
    if not match or not 0 < int(match.group(3) or port) < 65536:
        raise _wrong(target, "of HOST:PORT")
    return Endpoint(match.group(1) or match.group(2), int(match.group(3) or port))


def _wrong(got: str, limit: str) -> errors.InvalidArgument:
    return errors.InvalidArgument(f"target: got {got!r}, must be {limit}",
                                  errors.ErrorDetail(field="target", got=got, limit=limit))
