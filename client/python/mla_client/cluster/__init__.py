"""All servers of a cluster behind one client.

    client = mla_client.Client.connect("etcd://registry:2379/fleet", tenant="research")
    model = client.register_model(spec)
    sequence = model.open_sequence(prefix=mla_client.Prefix(tokens))   # where it costs least
    try:
        with client.step([(sequence, rows)]) as step: ...
    except mla_client.MlaError:
        client.recover(sequence, mla_client.Prefix(tokens))            # then send the rows again
"""

from __future__ import annotations

import dataclasses
import os
import socket
from typing import TYPE_CHECKING, Any, Callable, Mapping, Optional

from mla_client import errors
from mla_client.base import schemes
from mla_client.cluster.targets import names_cluster

if TYPE_CHECKING:
    from mla_client.cluster.client import ClusterClient
    from mla_client.cluster.members import Member

# A server is asked for its boot id within this time.
ASK_S = 2.0


def connect(target: str, *, tls: Any = None, client_id: str = "", timeout_s: float = 30.0,
            on_peer: Optional[Callable[[Any], None]] = None, home: str = "", costs: Any = None,
            etcd: Optional[Mapping[str, str]] = None, same_host: bool = True,
            sockets: str = "", keep_s: Optional[float] = None, subset: Optional[int] = None,
            **arguments: Any) -> "ClusterClient":
    """Returns a client of the servers that a target names. `arguments` go to Client.connect for
    each server.

    `home`: the address of the server for sequences that share nothing; `costs`: a
    placement.Costs; `etcd`: ca, cert and key of the registry, as paths; `same_host` False: servers
    of this host are reached as others are, not by the unix sockets that the registry has;
    `sockets`: paths of this host's sockets, with `*` ("/run/mla/*.sock"), by which its servers are
    reached whatever the registry has, also with TLS: calls there then have the tenant that the
    server gives to those who use its socket; `keep_s`: how long the members are used while the
    registry does not answer (default: ten minutes); `subset`: servers that this worker uses as long
    as they have room (default: 8; 0: all)."""
    # Here, as these modules import the client that this package's parent makes.
    from mla_client.client import Client, Tls
    from mla_client.cluster import members, placement, registry, targets
    from mla_client.cluster.client import SUBSET, ClusterClient
    from mla_client.connection.same_host import SameHost
    if isinstance(tls, Mapping):
        tls = Tls(**tls)
    if tls is not None and not tls.server_name and target.startswith("dns:///"):
        # Its certificate has the name, not the addresses that the name has.
        tls = dataclasses.replace(tls, server_name=targets.dns_target(target).host)
    source = registry.registry_of(target, **dict(etcd or {}))
    if client_id == "":
        client_id = "py-" + os.urandom(8).hex()

    def boot_id_of(address: str, files: Any = None) -> int:
        with Client.connect(address, tls=files, timeout_s=min(timeout_s, ASK_S),
                            transport="inline", **{name: value for name, value in arguments.items()
                                                   if name in ("tenant", "server_uid")}) as one:
            return one.boot_id
    here = SameHost(sockets, lambda path: boot_id_of("unix:" + path)) if sockets else None

    def to_member(member: "Member") -> Client:
        address, files = _address_of(member, same_host and tls is None), tls
        if here is not None:
            path = here.path_of(boot_id_of(address, tls))
            if path:
                address, files = "unix:" + path, None
        return Client.connect(address, tls=files, client_id=client_id, timeout_s=timeout_s,
                              **arguments)

    gone: Callable[[list], None] = lambda addresses: None
    fleet = members.MemberList(source.read, on_gone=lambda addresses: gone(addresses),
                               keep_s=members.KEEP_S if keep_s is None else keep_s)
    client = ClusterClient(fleet, to_member, client_id=client_id, timeout_s=timeout_s, home=home,
                           costs=costs or placement.Costs(), moved=source.moved, on_peer=on_peer,
                           subset=SUBSET if subset is None else subset, on_close=source.close)
    gone = client.gone
    if not fleet.refresh():
        error = fleet.error or errors.Unavailable("the registry did not answer")
        client.close()
        raise error
    fleet.start()
    return client


def _address_of(member: "Member", same_host: bool) -> str:
    here = same_host and member.socket and member.node == socket.gethostname()
    return f"unix:{member.socket}" if here and os.path.exists(member.socket) else member.address


schemes.register(names_cluster, connect)
