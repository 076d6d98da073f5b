"""The gRPC client."""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from typing import Any, Callable, Iterator, List, Mapping, Optional, Sequence as Seq, Tuple, Union

import grpc
import numpy.typing as npt

from mla_client import errors, messages, wire
from mla_client.base import deadlines, schemes
from mla_client.connection.calls import Calls
from mla_client.connection.channels import Channels, Tls, TlsFiles, maker_of
from mla_client.connection.leases import LeaseRenewer
from mla_client.connection.targets import check_socket_owner, shm_path_of, unix_path_of
from mla_client.gen import (admin_pb2, admin_pb2_grpc, cache_pb2_grpc, model_pb2, model_pb2_grpc,
                            sequence_pb2, sequence_pb2_grpc)
from mla_client.messages import state_of
from mla_client.moves import Following, Moves
from mla_client.operations import Operations
from mla_client.pages import Pages
from mla_client.service import Model, Registered
from mla_client.service.projected import ProjectedWeights
from mla_client.shm.shared_memory import DeviceWish
from mla_client.streams.steps import Steps
from mla_client.streams.stream import StepStream
from mla_client.streams.transport import StreamMaker
from mla_client.types import (ModelSpec, Prefix, PrefixMatch, Probe, SequenceState,
                              WeightsStatus)

API_VERSION = "mla.v1"
# Between two tries while another worker uploads weights of the same model.
UPLOAD_PAUSE_S = 0.05
# Attempts to read a tail in parts from its beginning.
TAIL_TURNS = 4


class Client(Steps, Pages, Operations, Following):
    """A connection to a server. Close it, or use it in a `with` block.

    Belongs to the process that made it. In a child that was forked from that process every call is
    FailedPrecondition (reason "forked"), at once; `close` there ends nothing of the parent's.

    Options of `connect` that decide how steps travel:

    `transport` says how steps travel: "ring" (messages and tensors in shared memory), "shm"
    (tensors in shared memory, messages over gRPC), "inline" (all over gRPC), "ucx" (a ring that
    travels over UCX to a server of any host; needs the C library, mla_client.native), "ucx_puts"
    (likewise, with tensors put where the server allows it, for RDMA: docs/rdma.md), "ucx_device"
    (likewise, into memory of the server's GPU; an error where it cannot), or "auto": the ring
    where a unix target's server offers one, else inline with the reason in the log. Each stream
    gets memory of its own: `shared_bytes` (at most the server's limit), or, if that is None, 64
    MiB, 32 and so on down to 4, depending on what the server has left; 0 asks for none, which
    leaves "inline". A wait on a ring looks for `spin_us` before it sleeps; so does the server, as
    far as it allows.

    `device_bytes` (rounded up to MiB) asks for memory of the server's GPU in addition to each
    stream's ring, for `buffers(..., device="cuda")`. `device` is the GPU that this process uses,
    and `device_library` its runtime, if it is not under its usual name. A server that does not
    grant the memory is Unavailable. `pinned` registers each ring's memory with the driver of
    `device`, so that no thread waits for copies and calls can be chained (`Step.chain`). It has no
    effect without the C library (mla_client.native).
    """

    def __init__(self, channel: grpc.Channel, *, tenant: str = "default", client_id: str = "",
                 timeout_s: float = 30.0, message_bytes: int = 0, lease_ms: int = 0,
                 secure: bool = False, transport: str = "auto", shm_path: str = "",
                 shared_bytes: Optional[int] = None, spin_us: int = 20,
                 device: DeviceWish = DeviceWish(),
                 make_channel: Optional[Callable[[], grpc.Channel]] = None) -> None:
        """Takes over a channel; `connect` makes one and explains the options. `shm_path` is the
        path of the server's shared-memory socket; empty: no shared memory. `make_channel` makes
        channels for streams; without it streams share the channel of calls."""
        self.timeout_s = timeout_s = deadlines.checked("timeout_s", timeout_s)
        wire.check_number("lease_ms", lease_ms)
        self.client_id = client_id or "py-" + secrets.token_hex(8)
        self._metadata = () if secure else (("mla-tenant", tenant),)
        self._lease_ms = lease_ms
        self._channel = channel
        self._channels = Channels(channel, make_channel)
        self._calls = Calls(channel, self._metadata, timeout_s)
        self._home = self._calls.home
        self._admin = admin_pb2_grpc.AdminStub(channel)
        self._models = model_pb2_grpc.ModelsStub(channel)
        self._sequences = sequence_pb2_grpc.SequencesStub(channel)
        self._cache = cache_pb2_grpc.CacheStub(channel)
        self._lock = threading.Lock()
        self._opening = threading.Lock()  # one thread opens the own stream, others wait for it
        self._stream: Optional[StepStream] = None
        self._streams: List[StepStream] = []
        self._closed = self._calls.closed
        self._renewer = LeaseRenewer(self._renew)
        info = self.server_info()
        if info.api_version != API_VERSION:
            raise errors.Unimplemented(f"server speaks {info.api_version}, must be {API_VERSION}")
        self.boot_id = self._calls.boot_id = info.boot_id
        # Lease of a sequence that asks for none.
        self._default_lease_ms = lease_ms or info.limits.sequence_lease_ms
        self._maker = StreamMaker(self._channels, self._metadata, info, self._calls.see_boot_id,
                                  transport=transport, shm_path=shm_path, tenant=tenant,
                                  message_bytes=message_bytes, shared_bytes=shared_bytes,
                                  spin_us=spin_us, timeout_s=timeout_s, wish=device)
        self.message_bytes = self._maker.inline_bytes  # for gRPC messages
        self._chunk_bytes = min(self.message_bytes - wire.HEADER_BYTES,
                                info.limits.weight_chunk_bytes or self.message_bytes)
        if transport != "auto":
            self._own_stream()  # fails now if the named transport is missing

    @classmethod
    def connect(cls, target: str, *, tenant: str = "default", tls: TlsFiles = None,
                client_id: str = "", timeout_s: float = 30.0, message_bytes: int = 0,
                lease_ms: int = 0, transport: str = "auto", shared_bytes: Optional[int] = None,
                spin_us: int = 20, server_uid: Optional[int] = None, device_bytes: int = 0,
                device: int = 0, device_library: str = "", pinned: bool = False,
                http_proxy: bool = False,
                follow_moves: Union[bool, Callable[[str], "Client"]] = False,
                on_peer: Optional[Callable[[Model], None]] = None,
                cluster: Optional[Mapping[str, Any]] = None) -> "Client":
        """Connects to `host:port` or `unix:/path`; or to all servers of a cluster, which has the
        same methods: `etcd://HOST:2379/PREFIX`, `dns:///NAME:50551`, or `a:50551,b:50551`
        (docs/cluster.md; `cluster` has the options of mla_client.cluster.connect).

        Without TLS the tenant travels as metadata; with it the certificate decides. `client_id`
        names this worker in lists of sequences (default: a random name). `message_bytes` bounds the
        messages of this client (default: 4 MiB), and so does the server's bound. `timeout_s` is the
        deadline of every call that names none; float("inf") waits forever. `lease_ms` is the lease
        that sequences ask for (0: the server's default) and a thread renews them while the client
        is open. A path is meant as it stands, whatever characters it has. `http_proxy` connects
        through the proxy that the environment names, except to this host.

        `server_uid` is the user of a unix target's server, where that is neither root nor this
        process's: in a folder that every user may write to, sockets of others are refused.

        `follow_moves` goes on with sequences where a drain has moved them, from the next call or
        step that names one: over connections like this one, with the same TLS files (the server's
        name is then the address's), or over connections that a function makes for HOST:PORT. A call
        waits for a sequence that is on its way until `timeout_s`. Weights may not have moved, as
        where the server there is older: `on_peer` gets each Model there first, to upload them (a
        repeat changes nothing). Without `follow_moves`, such calls are NotFound (reason "moved",
        and `detail.peer`); steps on streams of `open_stream` are so in any case.
        """
        connect_others = schemes.connector_of(target)
        if connect_others is not None:
            return connect_others(  # its client has the same methods
                target, tenant=tenant, tls=tls, client_id=client_id, timeout_s=timeout_s,
                message_bytes=message_bytes, lease_ms=lease_ms, transport=transport,
                shared_bytes=shared_bytes, spin_us=spin_us, server_uid=server_uid,
                device_bytes=device_bytes, device=device, device_library=device_library,
                pinned=pinned, http_proxy=http_proxy, on_peer=on_peer, **(cluster or {}))
        tls = Tls(**tls) if isinstance(tls, Mapping) else tls
        if follow_moves is True and tls is None:
            raise errors.InvalidArgument("follow_moves: without `tls` it must be a function that "
                                         "connects")
        deadlines.checked("timeout_s", timeout_s)
        for path in (unix_path_of(target), shm_path_of(target)):
            check_socket_owner(path, server_uid)
        make_channel = maker_of(target, tls, message_bytes, http_proxy)
        channel = make_channel()
        try:
            client = cls(channel, tenant=tenant, client_id=client_id, timeout_s=timeout_s,
                         message_bytes=message_bytes, lease_ms=lease_ms, secure=tls is not None,
                         transport=transport, shm_path=shm_path_of(target) if tls is None else "",
                         shared_bytes=shared_bytes, spin_us=spin_us,
                         device=DeviceWish(-(-device_bytes >> 20), device, device_library, pinned),
                         make_channel=make_channel)
        except BaseException:
            channel.close()
            raise
        if follow_moves:
            def connect_peer(peer: str) -> "Client":
                return cls.connect(
                    peer, tls=dataclasses.replace(tls, server_name="") if tls else None,
                    client_id=client.client_id, timeout_s=timeout_s, message_bytes=message_bytes,
                    lease_ms=lease_ms, http_proxy=http_proxy, follow_moves=True, on_peer=on_peer)
            client._moves = Moves(connect_peer if follow_moves is True else follow_moves, on_peer)
        return client

    def __repr__(self) -> str:
        state = "closed" if self._closed.is_set() else f"boot id {self.boot_id:016x}"
        return f"<Client {self.client_id!r}, {state}>"

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the streams (open steps are aborted) and the lease renewal. Sequences stay until
        their lease ends. In a forked child it does nothing."""
        self._close(lambda stream: stream.close())

    def give_up(self) -> None:
        """Closes the connection to a server that does not answer: does what `close` does, and waits
        for nothing.
        """
        self._close(lambda stream: stream.fail(errors.Unavailable(
            "the connection was given up: the server does not answer")))

    def _close(self, end: Callable[[Any], None]) -> None:
        if self._home.left:
            return
        self._closed.set()
        with self._lock:
            opened, self._streams, self._stream = self._streams, [], None
        for stream in opened:
            end(stream)
        self._close_moves()
        self._renewer.close()
        self._channels.close()

    # --- Operation

    def server_info(self) -> admin_pb2.GetServerInfoReply:
        """Returns the server's versions, device, backends and limits."""
        return self._call(self._admin.GetServerInfo, admin_pb2.GetServerInfoRequest())

    def stats(self) -> admin_pb2.GetStatsReply:
        """Returns the server's counters since its start."""
        return self._call(self._admin.GetStats, admin_pb2.GetStatsRequest())

    def models(self) -> List[ModelSpec]:
        """Returns the tenant's models."""
        reply = self._call(self._models.List, model_pb2.ListModelsRequest())
        return [messages.spec_from_proto(entry.model) for entry in reply.models]

    def sequences(self) -> List[SequenceState]:
        """Returns this client's open sequences."""
        request = sequence_pb2.GetRequest(client_id=self.client_id)
        return [state_of(info) for info in self._call(self._sequences.Get, request).sequences]

    @property
    def lease_error(self) -> Optional[errors.MlaError]:
        """Says why the last renewal of the leases failed; None if it did not. In a forked child: an
        error, because no lease is renewed there.
        """
        return self._home.error() if self._home.left else self._renewer.error

    def renew_leases(self, lease_ms: int = 0) -> int:
        """Renews the leases of all of this client's sequences and returns how many there are.
        `lease_ms` is their length from now on; 0: each keeps its own.
        """
        request = sequence_pb2.RenewLeaseRequest(client_id=self.client_id, lease_ms=lease_ms)
        renewed = self._call(self._sequences.RenewLease, request).renewed
        if lease_ms:
            self._renewer.set_all(lease_ms)
        return renewed

    # --- Service

    def _register(self, spec: ModelSpec, lease_ms: int, kv_scales: Seq[float],
                  sinks: Seq[float]) -> Registered:
        wire.check_number("lease_ms", lease_ms)
        reply = self._call(self._models.Register, model_pb2.RegisterRequest(
            model=messages.spec_to_proto(spec), lease_ms=lease_ms, kv_scales=kv_scales,
            sinks=sinks))
        in_force = messages.spec_from_proto(reply.model)
        messages.check_in_force(spec, in_force)
        return Registered(in_force, reply.page_group_bytes, reply.instance)

    def _unregister(self, model_id: str) -> None:
        self._call(self._models.Unregister, model_pb2.UnregisterRequest(model_id=model_id))

    def _upload_scales(self, model_id: str, scales: Seq[float]) -> None:
        self._call(self._models.UploadScales, model_pb2.UploadScalesRequest(
            model_id=model_id, scales=scales))

    def _upload_sinks(self, spec: ModelSpec, layer_begin: int, head_begin: int,
                      sinks: npt.NDArray) -> List[int]:
        reply = self._call(self._models.UploadSinks, model_pb2.UploadSinksRequest(
            model_id=spec.model_id, layer_begin=layer_begin, layer_count=sinks.shape[0],
            head_begin=head_begin, head_count=sinks.shape[1], sinks=sinks.reshape(-1).tolist()))
        return list(reply.missing_layers)

    def _upload(self, spec: ModelSpec, layer: int, head_begin: int, w_uk: npt.NDArray,
                w_uv: npt.NDArray) -> WeightsStatus:
        return self._send_weights(lambda: messages.weight_chunks(
            spec.model_id, layer, head_begin, w_uk, w_uv, self._chunk_bytes))

    def _upload_projected(self, spec: ModelSpec, layer: int, head_begin: int,
                          weights: ProjectedWeights) -> WeightsStatus:
        return self._send_weights(lambda: messages.projected_chunks(
            spec.model_id, layer, head_begin, weights, self._chunk_bytes))

    def _send_weights(self, messages_of: Callable[[], Iterator[Any]]) -> WeightsStatus:
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                reply = self._call(self._models.UploadWeights, None, idempotent=False,
                                   requests=messages_of)
            except errors.Aborted as error:
                # Workers of one model that start together: one upload at a time.
                if (error.detail.reason != "upload_under_way" or time.monotonic() > deadline
                        or self._closed.wait(UPLOAD_PAUSE_S)):
                    raise
            else:
                return WeightsStatus(reply.complete, list(reply.missing_layers), reply.bytes)

    def _open(self, model_id: str, request_id: str, lease_ms: int,
              prefix: Optional[Prefix]) -> Tuple[SequenceState, PrefixMatch]:
        request = sequence_pb2.OpenRequest(model_id=model_id, request_id=request_id,
                                           client_id=self.client_id,
                                           lease_ms=lease_ms or self._lease_ms)
        if prefix is not None and prefix.max_rows != 0:
            request.prefix.CopyFrom(messages.prefix_to_proto(prefix))
        reply = self._call(self._sequences.Open, request)
        return (self._keep(state_of(reply.sequence), lease_ms),
                messages.match_from_proto(reply.match))

    def _probe(self, model_id: str, prefix: Prefix, timeout_s: float) -> Callable[[], Probe]:
        """Asks at once; what it returns waits for the answer, at most `timeout_s` in all."""
        self._home.check()
        request = sequence_pb2.ProbeRequest(model_id=model_id)
        if prefix.max_rows != 0:
            request.prefix.CopyFrom(messages.prefix_to_proto(prefix))
        with self._calls.while_open():
            answer = self._sequences.Probe.future(request, metadata=self._metadata,
                                                  timeout=timeout_s)

        def wait() -> Probe:
            try:
                reply = answer.result()
            except grpc.RpcError as rpc_error:
                raise errors.from_rpc(rpc_error) from rpc_error
            except grpc.FutureCancelledError as error:
                raise errors.Cancelled("probe: the connection was closed") from error
            self._calls.check(reply)
            return messages.probe_from_proto(reply)
        return wait

    def probe(self, model: Model, prefix: Prefix = Prefix(), *, timeout_s: float = 1.0) -> Probe:
        """Returns how many rows of this prefix the server has now, and how busy it is. Changes
        nothing on the server. Counts whole pages only. Raises Unimplemented if the server lacks
        the capability "probe"."""
        return self._probe(model.spec.model_id, prefix, timeout_s)()

    def _match(self, sequence_id: int, epoch: int, first_row: int,
               prefix: Prefix) -> Tuple[SequenceState, PrefixMatch]:
        reply = self._call(self._sequences.Match, sequence_pb2.MatchRequest(
            sequence_id=sequence_id, expected_epoch=epoch, first_row=first_row,
            prefix=messages.prefix_to_proto(prefix)))
        return (state_of(reply.sequence, "match", sequence_id),
                messages.match_from_proto(reply.match))

    def _fork(self, sequence_id: int, epoch: int, length: Optional[int], request_id: str,
              lease_ms: int) -> SequenceState:
        request = sequence_pb2.ForkRequest(sequence_id=sequence_id, expected_epoch=epoch,
                                           request_id=request_id, client_id=self.client_id,
                                           lease_ms=lease_ms or self._lease_ms)
        if length is not None:
            request.length = length
        state = state_of(self._call(self._sequences.Fork, request).sequence)
        if state.length != length and length is not None:
            raise messages.wrong_answer("fork", "length", state.length, length)
        return self._keep(state, lease_ms)

    def _truncate(self, sequence_id: int, length: int, epoch: int) -> Tuple[int, int]:
        reply = self._call(self._sequences.Truncate, sequence_pb2.TruncateRequest(
            sequence_id=sequence_id, length=length, expected_epoch=epoch))
        if reply.length != length:
            raise messages.wrong_answer("truncate", "length", reply.length, length)
        return reply.epoch, length

    def _read_tail(self, sequence_id: int, epoch: int, tail_bytes: int) -> Tuple[int, bytes]:
        deadline = time.monotonic() + self.timeout_s
        for _ in range(TAIL_TURNS):
            tail, serial = b"", 0
            while True:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise errors.DeadlineExceeded("read_tail: no whole tail before the deadline")
                reply = self._call(self._sequences.ReadTail, sequence_pb2.ReadTailRequest(
                    sequence_id=sequence_id, expected_epoch=epoch, offset=len(tail)),
                                   timeout_s=remaining_s)
                if tail and reply.serial != serial:
                    break  # a step has stored another tail
                serial, tail = reply.serial, tail + reply.tail
                if reply.tail_bytes != tail_bytes or len(tail) > tail_bytes:
                    raise messages.wrong_answer(
                        "read_tail", "tail_bytes", max(reply.tail_bytes, len(tail)), tail_bytes)
                if len(tail) == tail_bytes:
                    return reply.position, tail
                if not reply.tail:
                    raise messages.wrong_answer("read_tail", "tail", "no bytes", "the next ones")
        raise errors.Aborted("read_tail: steps have left other tails while this one was read")

    def _release(self, sequence_ids: List[int]) -> List[int]:
        self._home.check()
        self._renewer.drop(sequence_ids)
        try:
            reply = self._call(self._sequences.Release, sequence_pb2.ReleaseRequest(
                sequence_ids=sequence_ids))
            absent = [one for one in sequence_ids if one in reply.not_found]
        except (errors.Unavailable, errors.ServerRestarted):
            if not self._last_peer:
                raise
            absent = list(sequence_ids)
        return self._release_moved(absent)

    def _get(self, sequence_ids: List[int]) -> Tuple[List[SequenceState], List[int]]:
        reply = self._call(self._sequences.Get,
                           sequence_pb2.GetRequest(sequence_ids=sequence_ids))
        asked = set(sequence_ids)
        for info in reply.sequences:
            if info.sequence_id not in asked:
                raise messages.wrong_answer("get", "sequence_id", f"{info.sequence_id:#x}",
                                            "one that was asked for")
        return [state_of(info) for info in reply.sequences], list(reply.not_found)

    def _adopt(self, sequence_id: int) -> SequenceState:
        return self._keep(super()._adopt(sequence_id), 0)

    def _hand_over(self, sequence_id: int) -> None:
        self._home.check()
        self._renewer.drop([sequence_id])

    def _call(self, method: Callable[..., Any], request: Any, *, idempotent: bool = True,
              requests: Optional[Callable[[], Iterator[Any]]] = None,
              timeout_s: Optional[float] = None) -> Any:
        """A control call."""
        return self._calls(method, request, idempotent=idempotent, requests=requests,
                           timeout_s=timeout_s)

    def _keep(self, state: SequenceState, lease_ms: int) -> SequenceState:
        """Renews the lease of a sequence that was opened or forked, from now on."""
        self._renewer.add(state.sequence_id, lease_ms or self._default_lease_ms,
                          state.lease_left_ms)
        return state

    def _renew(self, timeout_s: float) -> None:
        request = sequence_pb2.RenewLeaseRequest(client_id=self.client_id)
        self._call(self._sequences.RenewLease, request, timeout_s=min(timeout_s, self.timeout_s))
