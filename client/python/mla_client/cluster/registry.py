"""Where members are written down: etcd, the name service, or nowhere (a list that stays)."""

from __future__ import annotations

import abc
import socket
from typing import Any, Callable, Dict, List, Optional, Tuple

from mla_client import errors
from mla_client.cluster import targets
from mla_client.cluster.members import MOST_VALUE_BYTES, Member

# The longest time of a call to the registry. It is short because the cached list serves until then.
CALL_S = 2.0


class Registry(abc.ABC):
    """Thread-safe. Calls raise Unavailable where the registry does not answer."""

    @abc.abstractmethod
    def read(self) -> List[Member]:
        """The members."""

    def moved(self, sequence_id: int) -> str:
        """The address of the server to which a drain has moved a sequence; "": nothing is known."""
        return ""

    def close(self) -> None:
        """Ends its connections."""


class StaticRegistry(Registry):
    """A list that stays."""

    def __init__(self, addresses: List[str]) -> None:
        self._members = [Member.checked({"address": address}) for address in addresses]

    def read(self) -> List[Member]:
        return list(self._members)


class DnsRegistry(Registry):
    """Every address of a DNS name. In Kubernetes a headless service lists the pods that are ready.
    A pod that drains is not ready."""

    def __init__(self, name: targets.Endpoint,
                 look_up: Callable[..., List[Any]] = socket.getaddrinfo) -> None:
        self._name = name
        self._look_up = look_up

    def read(self) -> List[Member]:
        try:
            answers = self._look_up(self._name.host, self._name.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise errors.Unavailable(f"{self._name.host}: {error}",
                                     errors.ErrorDetail(reason="registry_away")) from error
        addresses = {str(targets.Endpoint(address[4][0], self._name.port)) for address in answers}
        return [Member.checked({"address": address}) for address in sorted(addresses)]


class EtcdRegistry(Registry):
    """Keys below a prefix: `servers/NAME` has a member's value under a lease, `moved/ID` the
    address of the server that has a sequence now. By etcd's JSON gateway, with Debian's
    python3-etcd3gw or PyPI's etcd3gw."""

    def __init__(self, target: targets.EtcdTarget, *, ca: str = "", cert: str = "", key: str = "",
                 timeout_s: float = CALL_S) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._files = (ca, cert, key)
        self._clients: Dict[targets.Endpoint, Any] = {}
        self._first = 0  # the endpoint that has answered last
        self.bad_values = 0  # that were no members, in the latest answer

    def read(self) -> List[Member]:
        members, bad = [], 0
        for _, text in self.below("servers/"):
            try:
                members.append(Member.from_json(text))
            except errors.InvalidArgument:
                bad += 1
        self.bad_values = bad
        return members

    def moved(self, sequence_id: int) -> str:
        for _, text in self.below(f"moved/{sequence_id:016x}"):
            return text[:MOST_VALUE_BYTES]
        return ""

    def below(self, name: str) -> List[Tuple[str, str]]:
        """Keys, without the prefix, and values."""
        start = f"{self._target.prefix}/{name}"
        entries = self.call(lambda etcd: etcd.get_prefix(start))
        cut = len(self._target.prefix) + 1
        return [(about["key"].decode("utf-8", "replace")[cut:], value.decode("utf-8", "replace"))
                for value, about in entries]

    def grant(self, ttl_s: int) -> Any:
        """A lease, to be refreshed within its time."""
        return self.call(lambda etcd: etcd.lease(ttl=ttl_s))

    def refresh(self, lease: Any) -> bool:
        """Returns true if the lease goes on, false if it has ended."""
        def act(etcd: Any) -> bool:
            lease.client = etcd  # any endpoint will do
            return bool(lease.refresh() > 0)
        return bool(self.call(act))

    def revoke(self, lease: Any) -> None:
        """Ends a lease: its keys go."""
        def act(etcd: Any) -> None:
            lease.client = etcd
            lease.revoke()
        self.call(act)

    def put(self, name: str, text: str, lease: Any = None) -> None:
        """Writes a value."""
        key = f"{self._target.prefix}/{name}"
        self.call(lambda etcd: etcd.put(key, text, lease=lease))

    def delete(self, name: str) -> None:
        """Removes a key, if it is there."""
        self.call(lambda etcd: etcd.delete(f"{self._target.prefix}/{name}"))

    def create(self, name: str, text: str, lease: Any) -> bool:
        """Writes a value where there is none; false if there is one."""
        key = f"{self._target.prefix}/{name}"
        return bool(self.call(lambda etcd: etcd.create(key, text, lease=lease)))

    def call(self, act: Callable[[Any], Any]) -> Any:
        """Runs `act` with a client of an endpoint that answers, each tried once."""
        endpoints = self._target.endpoints
        last: Optional[BaseException] = None
        for turn in range(len(endpoints)):
            place = (self._first + turn) % len(endpoints)
            try:
                answer = act(self._client(endpoints[place]))
                self._first = place
                return answer
            except errors.MlaError:
                raise
            except Exception as error:  # of etcd3gw, or of the libraries that it uses
                last = error
        raise errors.Unavailable(f"etcd at {', '.join(map(str, endpoints))}: {last}",
                                 errors.ErrorDetail(reason="registry_away"))

    def close(self) -> None:
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.session.close()

    def _client(self, endpoint: targets.Endpoint) -> Any:
        known = self._clients.get(endpoint)
        if known is not None:
            return known
        try:
            from etcd3gw.client import Etcd3Client
            from requests.adapters import HTTPAdapter
        except ImportError as error:
            raise errors.Unimplemented(
                "etcd targets need etcd3gw: apt-get install python3-etcd3gw, or "
                "pip install etcd3gw") from error
        timeout_s = self._timeout_s

        class Bounded(HTTPAdapter):
            """With a deadline for every call: sessions have none, whatever they are told."""

            def send(self, request: Any, *args: Any, **options: Any) -> Any:
                return super().send(request, *args, **{**options, "timeout": timeout_s})

        ca, cert, key = self._files
        client = Etcd3Client(
            host=endpoint.host, port=endpoint.port,
            protocol="https" if self._target.tls else "http", ca_cert=ca or None,
            cert_cert=cert or None, cert_key=key or None, api_path="/v3/")
        client.session.trust_env = False  # no proxy in between
        for scheme in ("http://", "https://"):
            client.session.mount(scheme, Bounded())
        return self._clients.setdefault(endpoint, client)


def registry_of(target: str, ca: str = "", cert: str = "", key: str = "") -> Registry:
    """Returns the registry that a target names. `ca` is the path of the certificate authorities for
    etcd; `cert` and `key` are paths of this client's certificate."""
    if target.startswith(("etcd://", "etcds://")):
        return EtcdRegistry(targets.etcd_target(target), ca=ca, cert=cert, key=key)
    if target.startswith("dns:///"):
        return DnsRegistry(targets.dns_target(target))
    return StaticRegistry(targets.static_target(target))
