"""A listener without a server: it gives clients any region that a test chooses."""

import fcntl
import mmap
import os
import pathlib
import socket
import struct
import tempfile
import threading

from mla_client.shm import handshake, ring, shared_memory

ENTRIES = 4
ARENA_BYTES = 1 << 16
BOOT_ID = 77


def ring_bytes(entries=ENTRIES):
    """Bytes in front of the arena."""
    size = handshake.RING_HEADER_BYTES + entries * (
        2 * handshake.ENTRY_BYTES + handshake.REPLY_SLOT_BYTES)
    return -(-size // handshake.PAGE_BYTES) * handshake.PAGE_BYTES


class FakeListener:
    """Answers one connection, or with an empty packet closes each without an answer; `region` is
    the server's view of the memory that it gave."""

    def __init__(self, *, seal=True, ring_header=None, descriptors=1, packet=None, closed_first=0,
                 arena_bytes=ARENA_BYTES, **connect_reply):
        """`connect_reply` overrides fields of the answer, `ring_header` words of the ring's header,
        `packet` the whole answer; `closed_first` connections are closed without an answer."""
        self._closed_first = closed_first
        self._folder = tempfile.TemporaryDirectory(prefix="mla-shm-")
        self.path = str(pathlib.Path(self._folder.name) / "mla.sock.shm")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(1)
        size = ring_bytes() + arena_bytes
        self._descriptor = os.memfd_create("fake-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, size)
        if seal:
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS,
                        fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.region = memoryview(mmap.mmap(self._descriptor, size))
        self.words, self.longs = self.region.cast("I"), self.region.cast("Q")
        submissions = handshake.RING_HEADER_BYTES
        self.completions = submissions + ENTRIES * handshake.ENTRY_BYTES
        self.replies = self.completions + ENTRIES * handshake.ENTRY_BYTES
        header = dict(magic=handshake.HANDSHAKE_MAGIC, entries=ENTRIES, submissions=submissions,
                      completions=self.completions, replies=self.replies)
        header.update(ring_header or {})
        handshake.RING_HEADER.pack_into(self.region, 0, *header.values())
        fields = dict(magic=handshake.HANDSHAKE_MAGIC, version=handshake.HANDSHAKE_VERSION,
                      flags=0, code=0, ring_entries=ENTRIES, handle=b"h" * 16,
                      region_bytes=size, arena_offset=ring_bytes(), boot_id=BOOT_ID, spin_us=0,
                      reserved1=0, message=b"")
        fields.update(connect_reply)
        self._packet = (handshake.CONNECT_REPLY.pack(*fields.values()) if packet is None
                        else packet)
        self._descriptors = descriptors
        self.accepted = 0
        self.connect_request = None
        self.connection = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        try:
            self.connection, _ = self._listener.accept()
            self.accepted += 1
            while not self._packet or self.accepted <= self._closed_first:
                self.connection.close()
                self.connection, _ = self._listener.accept()
                self.accepted += 1
        except OSError:
            return  # closed without a visitor
        self.connect_request = handshake.CONNECT_REQUEST.unpack(self.connection.recv(4096))
        if self._descriptors:
            socket.send_fds(self.connection, [self._packet], [self._descriptor] * self._descriptors)
        else:
            self.connection.send(self._packet)

    def connect(self, **options):
        """A client's end of the region."""
        options.setdefault("size", ARENA_BYTES)
        memory = shared_memory.SharedMemory.connect(self.path, **options)
        self._thread.join()
        return memory

    def fill(self, index, kind, tag, *, message=b"", at=None):
        """Writes a completion without publishing it."""
        slot = index % ENTRIES
        place = self.replies + slot * handshake.REPLY_SLOT_BYTES if at is None else at
        if message:
            self.region[place:place + len(message)] = message
        ring.COMPLETION.pack_into(
            self.region, self.completions + slot * handshake.ENTRY_BYTES + 4, kind,
            ring.PLAN_REUSED, 3, tag, BOOT_ID, 10, 20, 30, 40, 5, 6, place, len(message), 0)

    def publish(self, index):
        """Makes what `fill` wrote valid."""
        slot = index % ENTRIES
        self.words[(self.completions + slot * handshake.ENTRY_BYTES) // 4] = (
            index + 1) & 0xFFFFFFFF

    def submission(self, index):
        """(sequence word, fields) of a slot."""
        at = handshake.RING_HEADER_BYTES + index % ENTRIES * handshake.ENTRY_BYTES
        return (struct.unpack_from("<I", self.region, at)[0],
                ring.SUBMISSION.unpack_from(self.region, at + 4))

    def close(self):
        """Ends the connection and forgets the region."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # ends an accept that waits
        except OSError:
            pass
        self._thread.join()
        if self.connection is not None:
            self.connection.close()
        self._listener.close()
        os.close(self._descriptor)
        self._folder.cleanup()
