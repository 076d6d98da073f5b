"""Servers, a registry and a network that exist in one thread, under a clock that is moved by hand.

A row is the number of its token. A server keeps for each sequence a digest over the rows up to the
end of each page, and answers an attend with the digest at each row, so a worker sees from an output
whether the server has exactly the rows that it must have.
"""

import array
import collections
import random

import numpy as np

from mla_client import errors
from mla_client.cluster.members import Member
from mla_client.gen import sequence_pb2
from mla_client.moves import Following
from mla_client.service import AttendFuture, Model, Sequence
from mla_client.types import AttendResult, PrefixMatch, Probe, SequenceState

from simulated.registry import Registry

PAGE = 8
LEASE_S = 120.0
MASK = (1 << 61) - 1


def extend(digest, token):
    """The digest with one row more."""
    return (digest * 1000003 + int(token) + 1) % MASK


def shown(digest):
    """Returns the bits of a digest that a float32 output holds exactly."""
    return float(digest & 0xFFFFFF)


def no_pages():
    """Returns the error of a server whose pool is full."""
    return errors.ResourceExhausted("no pages", errors.ErrorDetail(reason="pages_exhausted"))


class Rows:
    """The rows of a sequence: a digest at the end of each page, and one for each row of the last
    page."""

    def __init__(self):
        self.pages = array.array("Q")
        self.rest = []

    def copy(self):
        """Rows of their own."""
        other = Rows()
        other.pages, other.rest = self.pages[:], list(self.rest)
        return other

    @property
    def length(self):
        return len(self.pages) * PAGE + len(self.rest)

    @property
    def digest(self):
        """Over all rows."""
        digest = self.pages[-1] if self.pages else 0
        for token in self.rest:
            digest = extend(digest, token)
        return digest

    def add(self, tokens):
        """The digests after each of them."""
        digest, after = self.digest, []
        for token in tokens:
            digest = extend(digest, token)
            after.append(digest)
            self.rest.append(int(token))
            if len(self.rest) == PAGE:
                self.pages.append(digest)
                self.rest = []
        return after


class Held:
    """A sequence on a server."""

    def __init__(self, sequence_id, client_id, now):
        self.id = sequence_id
        self.client_id = client_id
        self.epoch = 1
        self.rows = Rows()
        self.seen = now
        self.step = None


class Server:
    """One mla-server. `pages` bounds what its sequences and its prefix cache hold together; pages
    that both have count twice."""

    def __init__(self, world, address, pages):
        self.world = world
        self.address = address
        self.pages = pages
        self.up = True
        self.slow = False
        self.draining = False
        self.connections = set()
        self.start()

    def start(self):
        """A new process: nothing is left of the old one."""
        self.boot_id = self.world.rng.getrandbits(63) | 1
        self.held = {}
        self.cache = collections.OrderedDict()  # digest at a page's end -> None, oldest first
        self.moved = {}
        self.used = 0
        self.steps = {}
        self.draining = False
        self.connections = set()

    @property
    def free(self):
        """Pages that no sequence has."""
        return max(0, self.pages - self.used)

    def count(self, sequence):
        return len(sequence.rows.pages) + bool(sequence.rows.rest)

    def make_room(self):
        """Evicts cached pages, oldest first, for pages of sequences."""
        while self.used + len(self.cache) > self.pages and self.cache:
            self.cache.popitem(last=False)

    def drop(self, sequence_id):
        """A sequence ends; its whole pages stay in the cache, the ends before the beginnings."""
        sequence = self.held.pop(sequence_id, None)
        if sequence is None:
            return
        if sequence.step is not None:
            self.steps.pop(sequence.step, None)
        self.used -= self.count(sequence)
        for digest in reversed(sequence.rows.pages):
            self.cache.pop(digest, None)
            self.cache[digest] = None
        self.make_room()

    def expire(self):
        """Ends leases that no worker has renewed."""
        for sequence in list(self.held.values()):
            if self.world.now - sequence.seen <= LEASE_S:
                continue
            if self.world.renews(sequence.client_id, self, sequence.id):
                sequence.seen = self.world.now
            else:
                self.drop(sequence.id)

    def member(self):
        """As its announcer writes it."""
        return Member.checked({
            "address": self.address, "boot_id": self.boot_id, "draining": self.draining,
            "bytes_free": self.free,
            "bytes_cached": min(self.free, len(self.cache)), "bytes_total": self.pages,
            "sequences": len(self.held)})


class Answer(AttendFuture):
    """An answer that is there already."""

    def __init__(self, result):
        self._result = result

    def result(self):
        return self._result

    def done(self):
        return True


class _Calls:
    """The RPCs that the product's code for moves makes by themselves."""

    Get = "Get"


class Client(Following):
    """A connection to one server, as mla_client.Client is one over gRPC."""

    def __init__(self, world, member, client_id):
        self.world = world
        self.server = world.by_address[member.address]
        self.client_id = client_id
        self.timeout_s = 30.0
        self._sequences = _Calls
        self._renewer = self
        self._closed = self
        self.lease_error = None
        self.closed = False
        self.boot_id = None
        self.reach()
        self.boot_id = self.server.boot_id
        self.server.connections.add(client_id)

    # Stand in for the client's renewer and its closing event.
    def wait(self, seconds):
        self.world.advance(seconds)
        return self.closed

    def is_set(self):
        return self.closed

    def close(self):
        self.closed = True
        self.server.connections.discard(self.client_id)

    give_up = close

    def reach(self):
        """Raises the errors that a call can meet before it reaches the server."""
        self.world.calls += 1
        if self.closed:
            raise errors.Unavailable("the client is closed")
        if not self.world.reaches(self.client_id, self.server):
            raise errors.Unavailable(f"{self.server.address}: no connection")
        if self.boot_id is not None and self.boot_id != self.server.boot_id:
            raise errors.ServerRestarted("the server restarted: all sequences are gone")

    def find(self, sequence_id):
        """The sequence, or the error that says what became of it."""
        found = self.server.held.get(sequence_id)
        if found is None:
            peer = self.server.moved.get(sequence_id, "")
            raise errors.NotFound(f"sequence {sequence_id:#x}", errors.ErrorDetail(
                reason="moved" if peer else "sequence_not_found", peer=peer))
        found.seen = self.world.now
        return found

    def state(self, held):
        return SequenceState(held.id, held.epoch, held.rows.length, client_id=held.client_id)

    def _call(self, method, request, **options):
        assert method == "Get", method
        self.reach()
        reply = sequence_pb2.GetReply(boot_id=self.server.boot_id)
        for one in request.sequence_ids:
            held = self.server.held.get(one)
            if held is not None:
                held.seen = self.world.now
                reply.sequences.add(sequence_id=held.id, epoch=held.epoch,
                                    length=held.rows.length)
            else:
                reply.not_found.append(one)
                if one in self.server.moved:
                    reply.moved.add(sequence_id=one, peer=self.server.moved[one])
        return reply

    def models(self):
        self.reach()
        return []

    def server_info(self):
        self.reach()

        class Info:
            capabilities = ("probe",)
        return Info

    def attach(self, model, sequence_id, *, lease_ms=0):
        self.reach()
        held = self.find(sequence_id)
        return Sequence(model, self.state(held))

    def _probe(self, model_id, prefix, timeout_s):
        self.reach()
        server = self.server
        if server.slow:
            return self._too_slow
        rows, asked = 0, len(prefix.token_ids) // PAGE * PAGE
        if prefix.max_rows is not None:
            asked = min(asked, prefix.max_rows // PAGE * PAGE)
        for digest in self.world.digests(prefix.token_ids, asked):
            if digest not in server.cache:
                break
            rows += PAGE
        answer = Probe(server.boot_id, asked, rows, bytes_free=server.free,
                       bytes_total=server.pages, sequences=len(server.held),
                       draining=server.draining,
                       bytes_cached=min(server.free, len(server.cache)))
        return lambda: answer

    def _too_slow(self):
        raise errors.DeadlineExceeded("probe: no answer in time")

    # --- Service

    def _register(self, spec, lease_ms, kv_scales, sinks):
        self.reach()
        return spec, 1

    def register_model(self, spec, *, lease_ms=0, kv_scales=(), sinks=()):
        self.reach()
        return Model(self, spec, 1)

    def _unregister(self, model_id):
        self.reach()

    def _upload_scales(self, model_id, scales):
        raise NotImplementedError

    _upload_sinks = _upload = _fork = _read_tail = _upload_scales

    def _match(self, sequence_id, epoch, first_row, prefix):
        self.reach()
        return self.state(self.find(sequence_id)), PrefixMatch()

    def _open(self, model_id, request_id, lease_ms, prefix):
        self.reach()
        server = self.server
        if server.draining:
            raise errors.Unavailable("draining", errors.ErrorDetail(reason="draining"))
        most = 0 if prefix is None else min(len(prefix.token_ids), prefix.max_rows or 1 << 60)
        if server.free < 1:
            raise no_pages()
        held = Held(self.world.rng.getrandbits(63) | 1, self.client_id, self.world.now)
        for digest in self.world.digests(prefix.token_ids if prefix else (), most // PAGE * PAGE):
            if digest not in server.cache or server.used + 1 > server.pages:
                break
            server.cache.move_to_end(digest)
            held.rows.pages.append(digest)
            server.used += 1
        server.held[held.id] = held
        self.world.opened(held.id, server)
        server.make_room()
        return self.state(held), PrefixMatch(held.rows.length, "all")

    def export_rows(self, sequence, first_row=0, end_row=None):
        """All rows as one part, once it is taken."""
        self.reach()
        yield self.find(sequence.id).rows.copy()

    def import_rows(self, model, parts, *, behind=None, lease_ms=0):
        """A sequence with the rows of the part."""
        held = Held(self.world.rng.getrandbits(63) | 1, self.client_id, self.world.now)
        held.rows = next(iter(parts))
        self.reach()
        server = self.server
        if server.draining:
            raise errors.Unavailable("draining", errors.ErrorDetail(reason="draining"))
        if server.used + server.count(held) > server.pages:
            raise no_pages()
        server.used += server.count(held)
        server.held[held.id] = held
        self.world.opened(held.id, server)
        server.make_room()
        return Sequence(model, self.state(held))

    def _truncate(self, sequence_id, length, epoch):
        raise NotImplementedError

    def _release(self, sequence_ids):
        self.reach()
        absent = [one for one in sequence_ids if one not in self.server.held]
        for one in sequence_ids:
            self.server.drop(one)
        return self._release_moved(absent)

    def _get(self, sequence_ids):
        self.reach()
        found = [self.state(self.find(one)) for one in sequence_ids if one in self.server.held]
        return found, [one for one in sequence_ids if one not in self.server.held]

    def drop(self, sequence_ids):
        """As the renewer of leases."""

    def _begin(self, step):
        self.reach()
        server = self.server
        if server.draining and not any(one.id in server.moved for one in step.sequences):
            raise errors.Unavailable("draining", errors.ErrorDetail(
                reason="draining", retry_after_ms=100))
        pages = 0
        for sequence, rows in zip(step.sequences, step.rows):
            held = self.find(sequence.id)
            if held.epoch != sequence.epoch or held.rows.length != sequence.length:
                raise errors.FailedPrecondition("not as the step says")
            if held.step is not None:
                raise errors.FailedPrecondition("in a step")
            pages += -(-(sequence.length + rows) // PAGE) - server.count(held)
        if server.used + pages > server.pages:
            raise no_pages()
        for sequence in step.sequences:
            server.held[sequence.id].step = step.step_id
            self.world.stepped(sequence.id, server, step)
        server.steps[step.step_id] = [server.held[one.id].rows.copy() for one in step.sequences]
        return self

    def _attend(self, step, args):
        self.reach()
        rows = self.server.steps.get(step.step_id)
        if rows is None:
            raise errors.Aborted("no such step", step_aborted=True)
        after, at = [], 0
        for own, count in zip(rows, step.rows):
            after.extend(own.add(args.kv[at:at + count, 0]))
            at += count
        o = np.array([shown(digest) for digest in after], np.float32).reshape(-1, 1, 1)
        return Answer(AttendResult(o, None, []))

    def _end(self, step, committed, tails):
        self.reach()
        server = self.server
        rows = server.steps.pop(step.step_id, None)
        if rows is None:
            raise errors.Aborted("no such step", step_aborted=True)
        for sequence, own in zip(step.sequences, rows):
            held = self.find(sequence.id)
            server.used -= server.count(held)
            held.rows, held.step = own, None
            server.used += server.count(held)
        server.make_room()
        return [own.length for own in rows]

    def _abort(self, step):
        self.reach()
        self._give_up(step)

    def _give_up(self, step):
        if self.world.reaches(self.client_id, self.server):
            self.server.steps.pop(step.step_id, None)
            for held in self.server.held.values():
                if held.step == step.step_id:
                    held.step = None


class World:
    """All of it. `rng` decides everything that happens."""

    def __init__(self, seed, servers, pages):
        self.rng = random.Random(seed)
        self.now = 0.0
        self.calls = 0
        self.servers = [Server(self, f"server-{number}:50551", pages)
                        for number in range(servers)]
        self.by_address = {one.address: one for one in self.servers}
        self.registry = Registry(self)
        self.cut_workers = set()  # (client id, address) that do not reach each other
        self.cut_servers = set()  # addresses that no worker reaches
        self.renewing = {}        # client id -> the sequences that it holds
        self.faults = []
        self.stepping = {}        # sequence id -> the server process that has had its steps
        self._digests = {}

    def reaches(self, client_id, server):
        """Whether a worker's call comes to a server."""
        return server.up and not self.cut_off(server) and \
            (client_id, server.address) not in self.cut_workers

    def cut_off(self, server):
        """Returns true if no worker reaches it."""
        return server.address in self.cut_servers

    def renews(self, client_id, server, sequence_id):
        """Whether a worker keeps the lease."""
        return sequence_id in self.renewing.get(client_id, ()) and self.reaches(client_id, server)

    def digests(self, tokens, rows):
        """Digests at the ends of the first pages. Tokens are an array that does not change."""
        known = self._digests.get(id(tokens))
        if known is None or known[0] is not tokens:
            if len(self._digests) > 4096:
                self._digests.clear()
            ends, digest = array.array("Q"), 0
            for place, token in enumerate(tokens):
                digest = extend(digest, token)
                if place % PAGE == PAGE - 1:
                    ends.append(digest)
            known = self._digests[id(tokens)] = (tokens, ends)
        return known[1][:rows // PAGE]

    def opened(self, sequence_id, server):
        """A sequence is where it was opened."""
        self.stepping[sequence_id] = (server.address, server.boot_id)

    def stepped(self, sequence_id, server, step):
        """No sequence takes steps on two servers, unless a drain has moved it."""
        before = self.stepping.get(sequence_id)
        if before is not None and before != (server.address, server.boot_id):
            self.faults.append(f"sequence {sequence_id:#x} took steps at {before} and at "
                               f"{server.address}")
        self.stepping[sequence_id] = (server.address, server.boot_id)

    def move(self, sequence_id, source, target):
        """A drain hands one over."""
        held = source.held.pop(sequence_id)
        pages = source.count(held)
        source.used -= pages
        held.epoch += 1
        target.held[sequence_id] = held
        target.used += pages
        target.make_room()
        source.moved[sequence_id] = target.address
        self.registry.moved[sequence_id] = target.address
        self.stepping[sequence_id] = (target.address, target.boot_id)
