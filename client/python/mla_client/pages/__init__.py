"""Rows of sequences out of a server and into one, in files, and on the server's disk.

    with open("rows.mlapages", "wb") as file:
        mla_client.pages.write(file, client.export_rows(sequence))
    ...
    with open("rows.mlapages", "rb") as file:
        sequence = client.import_rows(model, mla_client.pages.read(file))

Parts are serialized messages of the page-group format; nothing in between needs to look into them.
"""

from __future__ import annotations

import hmac
import struct
from typing import (Any, BinaryIO, Callable, Iterable, Iterator, List, NamedTuple, Optional,
                    Sequence as Seq, Tuple)

import grpc

from mla_client import errors, messages
from mla_client.base import deadlines, process
from mla_client.connection.channels import Channels
from mla_client.gen import cache_pb2, cache_pb2_grpc, sequence_pb2
from mla_client.pages.events import Events
from mla_client.pages.hints import HintAnswer, HintKind, HintOutcome, Hints
from mla_client.service import Model, Sequence

MAGIC = b"MLAPAGES"
VERSION = 1
KEYED_VERSION = 2
KEY_BYTES, MAC_BYTES = 32, 16
# Size limit of one part of a file; servers do not take larger parts.
MOST_PART_BYTES = 1 << 30
# A stream of rows takes longer than a call: this many times the client's timeout.
STREAM_TIMEOUTS = 10


class _FrameMac:
    """MACs of the parts of a file: each MAC covers the one before it, the size and the part. b""
    without a key."""

    def __init__(self, key: Optional[bytes]) -> None:
        # An empty key is a mistake, and must not mean that a file has none.
        if key is not None and len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, this one {len(key)}")
        self._key = hmac.digest(key, b"mla page files", "sha256") if key else b""
        self._last = MAGIC + struct.pack("<I", KEYED_VERSION)

    def next(self, part: bytes) -> bytes:
        if not self._key:
            return b""
        text = self._last + struct.pack("<I", len(part)) + part
        self._last = hmac.digest(self._key, text, "sha256")[:MAC_BYTES]
        return self._last


def write(file: BinaryIO, parts: Iterable[bytes], key: Optional[bytes] = None) -> int:
    """Writes the parts of an export as a file of rows; returns the number of bytes. With a key of
    32 bytes a MAC goes with each part, which others cannot make.
    """
    mac = _FrameMac(key)
    written = file.write(MAGIC + struct.pack("<I", KEYED_VERSION if key else VERSION))
    for part in parts:
        written += file.write(struct.pack("<I", len(part)))
        written += file.write(part)
        written += file.write(mac.next(part))
    return written


def read(file: BinaryIO, key: Optional[bytes] = None) -> Iterator[bytes]:
    """Yields the parts of a file of rows. DataLoss gives the reason: it is not such a file, it ends
    too early, it was changed, or it was written under another key, or without one.
    """
    mac = _FrameMac(key)
    if file.read(len(MAGIC)) != MAGIC:
        raise errors.DataLoss("it is not a file of rows: it does not begin with MLAPAGES")
    version = int.from_bytes(file.read(4), "little")
    if version not in (VERSION, KEYED_VERSION):
        raise errors.DataLoss(f"version {version}, "
                              f"and this reads versions {VERSION} and {KEYED_VERSION}")
    if bool(key) != (version == KEYED_VERSION):
        raise errors.DataLoss("it was written without a key" if key else
                              "it was written with a key, which reading it needs")
    while True:
        head = file.read(4)
        if len(head) < 4:
            raise errors.DataLoss("it ends before its trailer")
        size = struct.unpack("<I", head)[0]
        part = file.read(size) if size <= MOST_PART_BYTES else b""
        if len(part) != size:
            raise errors.DataLoss("it ends inside a part")
        want = mac.next(part)
        if not hmac.compare_digest(file.read(len(want)), want):
            raise errors.DataLoss("it was changed, or written under another key")
        try:
            last = cache_pb2.PagesPart.FromString(part).HasField("trailer")
        except Exception as error:  # protobuf's own, whatever its runtime calls it
            raise errors.DataLoss("a part is not a message") from error
        if last and file.read(1):
            raise errors.DataLoss("it continues after the trailer")
        yield part
        if last:
            break


class Checkpoint(NamedTuple):
    """A sequence on the server's disk."""

    sequence_id: int
    epoch: int
    length: int  # rows; 0: the file is damaged
    bytes: int
    model_id: str
    saved_unix_ms: int


def _checkpoint(info: Any) -> Checkpoint:
    return Checkpoint(info.sequence_id, info.epoch, info.length, info.bytes, info.model_id,
                      info.saved_unix_ms)


class Pages(Events, Hints):
    """The calls for rows that leave and come, mixed into Client."""

    timeout_s: float
    client_id: str
    _cache: Any
    _sequences: Any
    _channels: Channels
    _metadata: Tuple[Tuple[str, str], ...]
    _call: Callable[..., Any]
    _keep: Callable[..., Any]
    _home: process.Home

    def export_rows(self, sequence: Sequence, first_row: int = 0,
                    end_row: Optional[int] = None) -> Iterator[bytes]:
        """Yields the committed rows [first_row, end_row) of a sequence, as parts. `first_row` is
        the first of a page; absent `end_row`: all rows. The sequence may be used during the export.
        """
        request = cache_pb2.ExportRequest(sequence_id=sequence.id, expected_epoch=sequence.epoch,
                                          first_row=first_row)
        if end_row is not None:
            request.end_row = end_row
        self._home.check()
        return self._export(request)

    def _export(self, request: Any) -> Iterator[bytes]:
        timeout_s = min(self.timeout_s * STREAM_TIMEOUTS, deadlines.LONGEST_S)
        with self._channels.stream() as channel:
            call = cache_pb2_grpc.CacheStub(channel).Export(request, metadata=self._metadata,
                                                            timeout=timeout_s)
            process.keep_at_fork(call)
            try:
                for part in call:
                    yield part.SerializeToString()
                    self._home.check()
            except grpc.RpcError as rpc_error:
                raise errors.from_rpc(rpc_error) from rpc_error

    def import_rows(self, model: Model, parts: Iterable[bytes], *,
                    behind: Optional[Sequence] = None, lease_ms: int = 0) -> Sequence:
        """Adds exported rows to a new sequence of the model, or after the rows of a given one: all
        of them or none. FailedPrecondition (import_differs) if they are rows of another model."""
        target = cache_pb2.ImportTarget(model_id=model.spec.model_id, client_id=self.client_id,
                                        lease_ms=lease_ms)
        if behind is not None:
            target.sequence_id, target.expected_epoch = behind.id, behind.epoch
        failed = []

        def requests() -> Iterator[Any]:
            yield cache_pb2.ImportRequest(target=target)
            try:
                for part in parts:
                    yield cache_pb2.ImportRequest(part=cache_pb2.PagesPart.FromString(part))
            except errors.MlaError as error:
                failed.append(error)  # the stream ends without its trailer, and is refused
        self._home.check()
        try:
            with self._channels.stream() as channel:
                reply = self._call(cache_pb2_grpc.CacheStub(channel).Import, None,
                                   idempotent=False, requests=requests,
                                   timeout_s=self.timeout_s * STREAM_TIMEOUTS)
        except errors.MlaError:
            if failed:
                raise failed[0]
            raise
        state = messages.state_of(reply.sequence, "import_rows",
                                  behind.id if behind is not None else None)
        if behind is not None:
            behind.length = state.length
            return behind
        return Sequence(model, self._keep(state, lease_ms))

    def attach(self, model: Model, sequence_id: int, *, lease_ms: int = 0) -> Sequence:
        """Returns a sequence that is already open: opened by another client of the tenant, or
        handed over to this server. NotFound; with the reason "moved", `detail.peer` names the
        server that has it.
        """
        reply = self._call(self._sequences.Get,
                           sequence_pb2.GetRequest(sequence_ids=[sequence_id]))
        return Sequence(model, self._keep(messages.only_of(reply, sequence_id), lease_ms))

    def checkpoint(self, sequences: Seq[Sequence]) -> List[Checkpoint]:
        """Writes the committed rows of sequences to the server's disk: they outlive the server."""
        reply = self._call(self._cache.Checkpoint, cache_pb2.CheckpointRequest(
            sequence_ids=[sequence.id for sequence in sequences]),
                           timeout_s=self.timeout_s * STREAM_TIMEOUTS)
        return [_checkpoint(info) for info in reply.checkpoints]

    def restore(self, model: Model, sequence_ids: Seq[int], *,
                lease_ms: int = 0) -> List[Sequence]:
        """Opens sequences of a model that were checkpointed, with the rows that they had then."""
        reply = self._call(self._cache.Restore, cache_pb2.RestoreRequest(
            sequence_ids=sequence_ids, client_id=self.client_id, lease_ms=lease_ms),
                           idempotent=False, timeout_s=self.timeout_s * STREAM_TIMEOUTS)
        got = [info.sequence_id for info in reply.sequences]
        if sorted(got) != sorted(sequence_ids):
            raise messages.wrong_answer("restore", "sequences", got, list(sequence_ids))
        return [Sequence(model, self._keep(messages.state_of(info), lease_ms))
                for info in reply.sequences]

    def checkpoints(self) -> List[Checkpoint]:
        """Returns the tenant's checkpoints."""
        reply = self._call(self._cache.ListCheckpoints, cache_pb2.ListCheckpointsRequest())
        return [_checkpoint(info) for info in reply.checkpoints]

    def drop_checkpoints(self, sequence_ids: Seq[int]) -> int:
        """Removes checkpoints from the server's disk; returns how many were there."""
        return self._call(self._cache.DropCheckpoints, cache_pb2.DropCheckpointsRequest(
            sequence_ids=sequence_ids)).dropped
