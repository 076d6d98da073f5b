"""The gRPC channels of a client, each of which is one connection.

Calls have a connection of their own: a server bounds the calls of a connection, and renewals of
leases must not wait for streams that stay open. Streams share other connections, a fixed number of
streams on each.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Iterator, List, Mapping, Optional, Tuple, Union

import grpc

from mla_client.base import process
from mla_client.connection.certificates import RenewedChannel, Tls
from mla_client.connection.targets import grpc_target, is_local

STOCK_MESSAGE_BYTES = 4 << 20
# A connection that is silent for this time is probed, and is given up if no answer comes in time: a
# firewall may have forgotten it. Servers take a probe every 5 s.
KEEPALIVE_MS = 20_000
KEEPALIVE_ANSWER_MS = 10_000
# The same to another host. gRPC has the kernel give a connection up, too, whose packets are not
# acknowledged for this time. The kernel sends them again after pauses that double, so a client
# would wait for as long as an outage lasted: after 2.5 s a new connection, which the kernel tries
# every second, is sooner back. Probes only go out during calls: gRPC reads the answer to another
# one up to 5 s later.
REMOTE_ANSWER_MS = 2_500
# Between two attempts to connect: a server that is back is found within the longest and a half.
LEAST_BACKOFF_MS, LONGEST_BACKOFF_MS = 100, 1000
# For one attempt: Linux sends its first packet again after each of the first four seconds, and
# later after pauses that double.
CONNECT_MS = 5_000
# By default a server serves 128 calls of one connection (wire.connection_streams).
STREAMS_A_CONNECTION = 8


# A mapping, for example from JSON, has the fields of Tls.
TlsFiles = Union[Tls, Mapping[str, str], None]


def maker_of(target: str, tls: Optional[Tls], message_bytes: int,
             http_proxy: bool) -> Callable[[], grpc.Channel]:
    """Makes channels to a target. `http_proxy`: connections go through the proxy that the
    environment names, except for connections to this host."""
    local = is_local(target)
    arguments: List[Tuple[str, Any]] = [
        ("grpc.max_receive_message_length", max(STOCK_MESSAGE_BYTES, message_bytes)),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_http_proxy", int(http_proxy and not local)),
        # Otherwise all channels of a process to one target are one connection.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_MS if local else REMOTE_ANSWER_MS),
        ("grpc.keepalive_permit_without_calls", int(local)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", LEAST_BACKOFF_MS),
        ("grpc.max_reconnect_backoff_ms", LONGEST_BACKOFF_MS),
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS)]
    address = grpc_target(target)
    if tls is not None and tls.server_name:
        arguments.append(("grpc.ssl_target_name_override", tls.server_name))

    def secure(credentials: grpc.ChannelCredentials) -> grpc.Channel:
        process.before_a_channel()
        return grpc.secure_channel(address, credentials, options=arguments)

    def make() -> grpc.Channel:
        if tls is not None:
            return RenewedChannel(tls, secure)
        process.before_a_channel()
        return grpc.insecure_channel(address, options=arguments)

    return make


class Channels:
    """The channels of one client. Threading: any thread."""

    def __init__(self, calls: grpc.Channel, make: Optional[Callable[[], grpc.Channel]]) -> None:
        """Takes over the channel of calls; without `make` streams share it."""
        process.before_a_channel()
        self.calls = calls
        self._make = make
        self._home = process.Home()
        self._lock = threading.Lock()
        self._streams: List[List[Any]] = []  # channel and how many streams it carries
        process.leave_at_fork(self)

    @contextlib.contextmanager
    def stream(self) -> Iterator[grpc.Channel]:
        """A channel with room for a stream, which it carries within the `with` block."""
        make = self._make
        if make is None:
            yield self.calls
            return
        with self._lock:
            carrier = next((one for one in self._streams if one[1] < STREAMS_A_CONNECTION), None)
            if carrier is None:
                carrier = [make(), 0]
                self._streams.append(carrier)
            carrier[1] += 1
        try:
            yield carrier[0]
        finally:
            if not self._home.left:  # a child's copy of the lock may stay taken for ever
                with self._lock:
                    carrier[1] -= 1

    def close(self) -> None:
        """Ends all connections. In a process forked from the client's it does nothing."""
        if self._home.left:
            return
        with self._lock:
            made, self._streams = self._streams, []
        for channel in [self.calls, *(carrier[0] for carrier in made)]:
            channel.close()

    def leave(self) -> None:
        """Called in a forked child: the objects here belong to the parent."""
        for channel in [self.calls, *(carrier[0] for carrier in self._streams)]:
            process.keep(channel)
