"""Targets: a server's address, as users write it and as gRPC needs it."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
import urllib.parse
from typing import Optional

from mla_client import errors

_UNIX = "unix:"
# A resolver of gRPC before an address, which may name a server of names.
_RESOLVER = re.compile(r"^(dns|ipv4|ipv6):(//[^/]*/)?")


def unix_path_of(target: str) -> str:
    """Path of a unix target's socket; of other targets empty."""
    if not target.startswith(_UNIX):
        return ""
    path = target[len(_UNIX):]
    return path[2:] if path.startswith("//") else path


def shm_path_of(target: str) -> str:
    """Path of the shared-memory listener next to the socket of a unix target; else empty."""
    path = unix_path_of(target)
    return path + ".shm" if path else ""


def grpc_target(target: str) -> str:
    """The target as gRPC takes it. A path is meant as it stands, and gRPC reads it as a part of a
    URI. InvalidArgument for a path with a comma, which gRPC takes for two paths."""
    path = unix_path_of(target)
    if not path:
        return target
    if "," in path:
        raise errors.InvalidArgument(
            f"target: got {target!r}, must be a path without a comma: gRPC takes it for two paths",
            errors.ErrorDetail(field="target", got=target, limit="a path without a comma"))
    return _UNIX + urllib.parse.quote(path)


def is_local(target: str) -> bool:
    """Returns true for a socket of this host: a unix target, or a loopback address."""
    if target.startswith((_UNIX, "unix-abstract:")):
        return True
    return all(_is_loopback(address) for address in _RESOLVER.sub("", target).split(","))


def _is_loopback(address: str) -> bool:
    bracketed = re.match(r"\[([^\]]*)\]", address)
    if bracketed:
        host = bracketed.group(1)
    else:  # without brackets an IPv6 address cannot have a port
        host = address if address.count(":") > 1 else address.partition(":")[0]
    if host.lower() == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        parsed = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


def check_socket_owner(path: str, server_uid: Optional[int] = None) -> None:
    """Raises PermissionDenied for a socket of another user in a folder that every user may write
    to, where any user can put a socket. Trusted are root, this process's user and `server_uid`."""
    try:
        owner = os.lstat(path).st_uid
        folder = os.stat(os.path.dirname(path) or ".")
    except OSError:
        return  # connecting will report the error
    if owner in (0, os.geteuid(), server_uid) or not folder.st_mode & stat.S_IWOTH:
        return
    raise errors.PermissionDenied(
        f"unix:{path}: belongs to user {owner} and lies in a folder that every user may write to; "
        "if that is the server's user, name it as server_uid")
