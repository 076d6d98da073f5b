"""Channels over mutual TLS whose PEM files are read again when they change.

gRPC for Python reads certificates when a channel is made and never again. So a channel here stands
for one of gRPC's, and for another with the new certificates from the first call after a change.
Calls that run, and streams, end on the connection on which they have begun.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import ssl
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

import grpc

# Between two looks at the files; a call that finds the server unavailable brings the next forward.
LOOK_S = 2.0


@dataclasses.dataclass(frozen=True)
class Tls:
    """PEM files of a mutual TLS connection. The certificate's name is the tenant. Connections that
    are made after a change of the files use the new ones."""

    ca: str
    cert: str
    key: str
    server_name: str = ""  # expected in the server's certificate, if not the target's host

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files."""
        ca, cert, key = self._read()
        return grpc.ssl_channel_credentials(ca, key, cert)

    def fitting_credentials(self) -> Optional[grpc.ChannelCredentials]:
        """The same, or None while the files cannot be used as a whole: one of them is missing, cut
        or garbage, or certificate and key do not fit each other."""
        try:
            before = self._read()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(self.ca)
            context.load_cert_chain(self.cert, self.key, password=lambda: b"")
            ca, cert, key = self._read()
        except (OSError, ValueError):  # errors of ssl are OSErrors
            return None
        return grpc.ssl_channel_credentials(ca, key, cert) if before == (ca, cert, key) else None

    def signature(self) -> Optional[Tuple[Tuple[int, int, int], ...]]:
        """Differs once a file has changed; None if one is missing."""
        try:
            stats = [os.stat(path) for path in (self.ca, self.cert, self.key)]
        except OSError:
            return None
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in stats)

    def _read(self) -> Tuple[bytes, ...]:
        return tuple(pathlib.Path(path).read_bytes() for path in (self.ca, self.cert, self.key))


@dataclasses.dataclass
class _Connection:
    channel: grpc.Channel
    calls: int = 0  # under way


class RenewedChannel(grpc.Channel):
    """A channel with the certificates of `tls`, made by `make`. Threading: any thread."""

    def __init__(self, tls: Tls, make: Callable[[grpc.ChannelCredentials], grpc.Channel]) -> None:
        self._tls, self._make = tls, make
        self._seen = tls.signature()  # taken before the files are read
        self._lock = threading.Lock()
        self._now = _Connection(make(tls.credentials()))
        self._before: List[_Connection] = []  # with older certificates, for calls under way
        self._next_look = time.monotonic() + LOOK_S
        self._closed = False

    def take(self) -> _Connection:
        """The connection for a call that begins now, to be given back when the call has ended."""
        with self._lock:
            idle = self._look() if time.monotonic() >= self._next_look else []
            self._now.calls += 1
            taken = self._now
        for one in idle:
            one.channel.close()
        return taken

    def give_back(self, taken: _Connection, unavailable: bool) -> None:
        """A call has ended. gRPC's threads may call this, so no channel is closed here."""
        with self._lock:
            taken.calls -= 1
            if unavailable:
                self._next_look = 0.0

    def _look(self) -> List[_Connection]:
        """Goes over to new certificates if there are any. Returns connections to be closed."""
        self._next_look = time.monotonic() + LOOK_S
        signature = self._tls.signature()
        if signature not in (None, self._seen) and not self._closed:
            credentials = self._tls.fitting_credentials()
            if credentials is not None:
                self._seen = signature
                self._before.append(self._now)
                self._now = _Connection(self._make(credentials))
        idle = [one for one in self._before if one.calls == 0]
        self._before = [one for one in self._before if one.calls > 0]
        return idle

    def unary_unary(self, *args: Any, **kwargs: Any) -> "_UnaryMethod":
        return _UnaryMethod(self, "unary_unary", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> "_UnaryMethod":
        return _UnaryMethod(self, "stream_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> "_StreamMethod":
        return _StreamMethod(self, "unary_stream", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> "_StreamMethod":
        return _StreamMethod(self, "stream_stream", args, kwargs)

    def subscribe(self, callback: Callable[..., None],
                  try_to_connect: Optional[bool] = False) -> None:
        """Of the connection that is in use now."""
        self._now.channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[..., None]) -> None:
        self._now.channel.unsubscribe(callback)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            ended, self._before = [self._now, *self._before], []
        for one in ended:
            one.channel.close()

    def __enter__(self) -> "RenewedChannel":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


class _Method:
    """A method of a service, on whichever connection is in use when it is called."""

    def __init__(self, owner: RenewedChannel, kind: str, args: Tuple[Any, ...],
                 kwargs: Dict[str, Any]) -> None:
        self._owner, self._kind, self._args, self._kwargs = owner, kind, args, kwargs
        self._made: Tuple[Optional[_Connection], Any] = (None, None)  # replaced as a whole

    def _on(self, connection: _Connection) -> Any:
        made, method = self._made
        if made is not connection:
            method = getattr(connection.channel, self._kind)(*self._args, **self._kwargs)
            self._made = (connection, method)
        return method


def _unavailable(call: Any) -> bool:
    return call.code() == grpc.StatusCode.UNAVAILABLE


class _UnaryMethod(_Method):
    """With one reply."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wait(lambda method: method(*args, **kwargs))

    def with_call(self, *args: Any, **kwargs: Any) -> Any:
        """As in gRPC."""
        return self._wait(lambda method: method.with_call(*args, **kwargs))

    def future(self, *args: Any, **kwargs: Any) -> Any:
        """As in gRPC."""
        taken = self._owner.take()
        try:
            call = self._on(taken).future(*args, **kwargs)
        except BaseException:
            self._owner.give_back(taken, False)
            raise
        call.add_done_callback(lambda done: self._owner.give_back(taken, _unavailable(done)))
        return call

    def _wait(self, run: Callable[[Any], Any]) -> Any:
        taken, unavailable = self._owner.take(), False
        try:
            return run(self._on(taken))
        except grpc.RpcError as error:
            unavailable = _unavailable(error)
            raise
        finally:
            self._owner.give_back(taken, unavailable)


class _StreamMethod(_Method):
    """With any number of replies."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        taken = self._owner.take()
        try:
            call = self._on(taken)(*args, **kwargs)
        except BaseException:
            self._owner.give_back(taken, False)
            raise
        if not call.add_callback(lambda: self._owner.give_back(taken, _unavailable(call))):
            self._owner.give_back(taken, _unavailable(call))
        return call
