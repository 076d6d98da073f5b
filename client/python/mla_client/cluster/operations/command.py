"""The commands of a cluster: python3 -m mla_client.cluster COMMAND.

    status     the members, how full they are, and what they say when they are asked
    sequences  this tenant's open sequences, by server; for operators, those of all tenants
    announce   keeps one server in the registry, next to it
    drain      empties one server: its sequences go to the others
    quotas     shares bounds of tenants over the servers, one leader at a time
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import socket
import sys
import threading
from typing import Any, Callable, Dict, List, Optional

from mla_client import errors, messages
from mla_client.client import Client, Tls
from mla_client.cluster import members, registry, targets
from mla_client.cluster.operations import announce, quotas
from mla_client.cluster.operations.drain import drain
from mla_client.cluster.operations.lease import ApiServer, KubernetesLease
from mla_client.types import Prefix, SequenceState

# Exit codes, the same as mlactl's.
GOOD, USAGE, AWAY, REFUSED, NOT_SERVING = 0, 1, 2, 3, 4


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    top = argparse.ArgumentParser(prog="mla_client.cluster", description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)

    def add(name: str, cluster: bool = True) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name)
        if cluster:
            subparser.add_argument(
                "--cluster", required=True, metavar="TARGET",
                help="etcd://HOST:2379/PREFIX, dns:///NAME:50551 or a:50551,b:50551")
        for option in ("--ca", "--cert", "--key"):
            subparser.add_argument(option, default="", help="PEM file, for the servers")
        for option in ("--etcd-ca", "--etcd-cert", "--etcd-key"):
            subparser.add_argument(option, default="", help="PEM file, for the registry")
        subparser.add_argument("--tenant", default="default")
        subparser.add_argument("--timeout-s", type=float, default=5.0)
        return subparser
    add("status").add_argument("--json", action="store_true", help="for programs")
    listed = add("sequences")
    listed.add_argument("--json", action="store_true", help="for programs")
    listed.add_argument("--all-tenants", action="store_true",
                        help="those of all tenants, for operators")
    one = add("announce", cluster=False)
    one.add_argument("--registry", required=True, help="etcd://HOST:2379/PREFIX")
    one.add_argument("--target", required=True, help="the server, as this host reaches it")
    one.add_argument("--address", required=True, help="HOST:PORT, as workers reach it")
    one.add_argument("--node", default=socket.gethostname())
    out = add("drain")
    out.add_argument("server", help="HOST:PORT of the server that is to be emptied")
    out.add_argument("--deadline-ms", type=int, default=0, help="0: the server's own")
    out.add_argument("--exit", action="store_true", help="end the process once it is empty")
    shares = add("quotas")
    shares.add_argument("--file", required=True, help='{"tenant": {"kv_bytes": 1000000}}')
    shares.add_argument("--lease", default="", metavar="NAMESPACE/NAME",
                        help="a Lease of Kubernetes, which the leader has; without it etcd's")
    shares.add_argument("--once", action="store_true", help="one turn, and no leader")
    return top


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs a command; returns the exit code."""
    args = parser().parse_args(arguments)
    try:
        return {"status": _status, "sequences": _sequences, "announce": _announce,
                "drain": _drain, "quotas": _quotas}[args.command](args)
    except errors.Unavailable as error:
        print(f"mla_client.cluster: {error}", file=sys.stderr)
        return AWAY
    except (errors.MlaError, OSError) as error:
        print(f"mla_client.cluster: {error}", file=sys.stderr)
        return REFUSED


def _registry(args: argparse.Namespace, target: str) -> registry.Registry:
    return registry.registry_of(target, args.etcd_ca, args.etcd_cert, args.etcd_key)


def _connect(args: argparse.Namespace, address: str) -> Client:
    cluster = getattr(args, "cluster", "")
    # Certificates have the name of all servers, not the addresses that the name has.
    name = targets.dns_target(cluster).host if cluster.startswith("dns:///") else ""
    tls = Tls(args.ca, args.cert, args.key, name) if args.cert else None
    return Client.connect(address, tenant=args.tenant, tls=tls, timeout_s=args.timeout_s,
                          transport="inline")


def _each(args: argparse.Namespace, act: Callable[[Client], Any]) -> Dict[str, Any]:
    """Returns the result of `act`, or its error, for each member."""
    source = _registry(args, args.cluster)
    results: Dict[str, Any] = {}
    for member in source.read():
        try:
            with _connect(args, member.address) as client:
                results[member.address] = (member, act(client))
        except errors.MlaError as error:
            results[member.address] = (member, error)
    source.close()
    return results


def _status(args: argparse.Namespace) -> int:
    found = _each(args, lambda client: client._probe("", Prefix(), args.timeout_s)())
    rows = []
    for address, (member, probe) in sorted(found.items()):
        failed = isinstance(probe, errors.MlaError)
        rows.append({
            "address": address, "node": member.node, "device": member.device,
            "version": member.version, "announced_boot_id": f"{member.boot_id:016x}",
            "state": ("away" if failed else "draining" if probe.draining else "serving"),
            "why": str(probe) if failed else "",
            "kv_percent": 0 if failed else round(100 * probe.fill),
            "sequences": 0 if failed else probe.sequences,
            "queued": 0 if failed else probe.queued})
    if args.json:
        print(json.dumps(rows))
    else:
        print(f"{'address':28} {'state':9} {'kv %':>5} {'sequences':>9} {'queued':>6}  device")
        for row in rows:
            print(f"{row['address']:28} {row['state']:9} {row['kv_percent']:5} "
                  f"{row['sequences']:9} {row['queued']:6}  {row['device']}"
                  f"{row['why'] and '  ' + row['why']}")
    return GOOD if all(row["state"] == "serving" for row in rows) and rows else NOT_SERVING


def _sequences(args: argparse.Namespace) -> int:
    from mla_client.gen import sequence_pb2

    def all_of(client: Client) -> List[SequenceState]:
        if args.all_tenants:
            return client.all_sequences()
        reply = client._call(client._sequences.Get, sequence_pb2.GetRequest())
        return [messages.state_of(one) for one in reply.sequences]
    results = _each(args, all_of)
    rows = [{"address": address, "tenant": one.tenant, "sequence": f"{one.sequence_id:016x}",
             "rows": one.length, "kv_bytes": one.kv_bytes, "age_ms": one.age_ms,
             "model": one.model_id, "client": one.client_id}
            for address, (_, sequences) in sorted(results.items())
            if not isinstance(sequences, errors.MlaError) for one in sequences]
    if args.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            tenant = f"{row['tenant']:20} " if args.all_tenants else ""
            age = "-" if row["age_ms"] is None else f"{row['age_ms'] / 1e3:.1f} s"
            print(f"{row['address']:28} {tenant}{row['sequence']} {row['rows']:8} {age:>12} "
                  f"{row['model']} {row['client']}")
    failed = [(address, one) for address, (_, one) in results.items()
              if isinstance(one, errors.MlaError)]
    for address, why in failed:
        print(f"mla_client.cluster: {address}: {why}", file=sys.stderr)
    return NOT_SERVING if failed else GOOD


def _etcd(args: argparse.Namespace, target: str) -> registry.EtcdRegistry:
    source = _registry(args, target)
    if not isinstance(source, registry.EtcdRegistry):
        raise errors.InvalidArgument(f"{args.command}: got {target!r}, must be etcd://HOST/PREFIX")
    return source


def _until_signal() -> threading.Event:
    stop = threading.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: stop.set())
    return stop


def _announce(args: argparse.Namespace) -> int:
    one = announce.Announcer(_etcd(args, args.registry), lambda: _connect(args, args.target),
                             args.address, args.target, args.node)
    one.run(_until_signal())
    return GOOD


def _drain(args: argparse.Namespace) -> int:
    source = _registry(args, args.cluster)
    try:
        remaining = drain(source, lambda address: _connect(args, address), args.server,
                          deadline_ms=args.deadline_ms, exit=args.exit, say=print)
    finally:
        source.close()
    return NOT_SERVING if remaining else GOOD


def _quotas(args: argparse.Namespace) -> int:
    wanted = quotas.FleetQuotas.from_json(pathlib.Path(args.file).read_text())
    source = _registry(args, args.cluster)
    clients: Dict[str, Client] = {}
    fleet = members.MemberList(source.read)

    def connected() -> Dict[str, Optional[Client]]:
        fleet.refresh()
        now = [one.address for one in fleet.all()]
        for address in [one for one in clients if one not in now]:
            clients.pop(address).close()
        for address in now:
            if address not in clients:
                try:
                    clients[address] = _connect(args, address)
                except errors.MlaError:
                    continue  # the next turn tries again
        return {address: clients.get(address) for address in now}

    def report(changed: int, failed: Dict[str, errors.MlaError]) -> None:
        for address, error in failed.items():
            print(f"mla_client.cluster: {address}: {error}", file=sys.stderr)
            client = clients.pop(address, None)
            if client is not None:
                client.close()
        if changed:
            print(f"{changed} bounds set", flush=True)
    reconciler = quotas.Reconciler(wanted, connected)
    if args.once:
        report(reconciler.turn(), reconciler.failed)
        return REFUSED if reconciler.failed else GOOD
    name = f"{socket.gethostname()}:{os.getpid()}"
    leader: quotas.Leader
    if args.lease:
        leader = KubernetesLease(ApiServer(), args.lease, name)
    else:
        leader = quotas.Leadership(_etcd(args, args.cluster), name)
    quotas.run(reconciler, leader, _until_signal(), report)
    return GOOD
