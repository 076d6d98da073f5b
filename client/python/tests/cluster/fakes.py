"""A service in memory for tests of the cluster's client. It counts rows; each output is the number
of the row's sequence."""

import dataclasses

import numpy as np

from mla_client import Geometry, ModelSpec, errors
from mla_client.cluster.client import ClusterClient
from mla_client.cluster.members import Member, MemberList
from mla_client.cluster.placement import Probe
from mla_client.moves import Following
from mla_client.service import AttendFuture, Model, Sequence
from mla_client.types import AttendResult, PrefixMatch, SequenceState, WeightsStatus

SPEC = ModelSpec("m", Geometry(2, 4, 0), 1, 1.0)
ROW = SPEC.geometry.row_dim


def in_force(spec, e4m3):
    """The spec as a server fills it in. Projected weights can be held as e4m3, or are bf16."""
    return dataclasses.replace(
        spec, page_size=spec.page_size or 8, query_precision=spec.query_precision or "split",
        kv_format=spec.kv_format or "bf16", attention=spec.attention or "dense",
        fp8_compute=spec.fp8_compute or "off",
        projected_dtype=spec.projected_dtype if e4m3 else "bf16")


class Answer(AttendFuture):
    """An answer, or an error."""

    def __init__(self, result):
        self._result = result
        self.late = False

    def result(self):
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def done(self):
        return not self.late


class FakeServer:
    """A server; `error` is raised by every call while it is set, `errors` by calls of a name."""

    def __init__(self, address):
        self.address = address
        self.sequences = {}
        self.probe = Probe(bytes_free=1 << 30, bytes_total=1 << 31)
        self.error = None
        self.errors = {}
        self.calls = []
        self.registered = []
        self.asked = self.terms = None  # the terms of the latest registration; the terms that hold
        self.expired = set()  # models whose leases have ended
        self.instances = {}  # of models, by name: how often each was made
        self.older = False  # a release that does not say what instance a model is
        self.uploads = []
        self.checkpoints = {}
        self.released = []
        self.draining = False
        self.e4m3 = True  # holds projected weights so
        self.during_open = None  # is called before an open is answered
        self.old = set()  # connections to the process that was there before

    def member(self):
        return Member.checked({"address": self.address, "boot_id": self.probe.boot_id,
                               "draining": self.draining})


class FakeClient(Following):
    """A connection to it."""

    def __init__(self, server):
        self.server = server
        self.timeout_s = 5.0
        self.closed = False
        self.boot_id = server.probe.boot_id
        self.lease_error = None

    def call(self, name):
        self.server.calls.append(name)
        if self in self.server.old:
            raise errors.ServerRestarted("another process")
        error = self.server.error or self.server.errors.get(name)
        if error is not None:
            raise error

    def check(self, model_id):
        if model_id in self.server.expired:
            raise errors.NotFound("no model", errors.ErrorDetail(reason="model_not_found"))

    def close(self):
        self.closed = True

    give_up = close

    def models(self):
        self.call("models")
        return []

    def register_model(self, spec, *, lease_ms=0, kv_scales=(), sinks=()):
        self.call("register")
        here = (spec.model_id in self.server.registered
                and spec.model_id not in self.server.expired)
        self.server.registered.append(spec.model_id)
        self.server.expired.discard(spec.model_id)
        self.server.asked = (lease_ms, list(kv_scales))
        lease, scales = self.server.terms if here else (0, [])
        self.server.terms = (lease_ms or lease, list(kv_scales) or scales)
        if not here:
            instance = self.server.instances.get(spec.model_id, 0) + 1
            self.server.instances[spec.model_id] = instance
        error = self.server.errors.get("registered")  # the answer is lost
        if error is not None:
            raise error
        return Model(self, in_force(spec, self.server.e4m3), 100,
                     0 if self.server.older else self.server.instances[spec.model_id])

    def _register(self, spec, lease_ms, kv_scales, sinks):
        return in_force(spec, self.server.e4m3), 100

    def _unregister(self, model_id):
        self.call("unregister")

    def _upload_scales(self, model_id, scales):
        self.call("scales")
        self.server.uploads.append(tuple(scales))
        self.server.terms = (self.server.terms[0], list(scales))

    def _upload_sinks(self, spec, layer_begin, head_begin, sinks):
        self.call("sinks")
        return []

    def _upload(self, spec, layer, head_begin, w_uk, w_uv):
        self.call("weights")
        self.server.uploads.append((layer, head_begin))
        return WeightsStatus(True, [], 0)

    def _open(self, model_id, request_id, lease_ms, prefix):
        self.call("open")
        self.check(model_id)
        if self.server.during_open is not None:
            self.server.during_open()
        number = 1000 * int(self.server.address.split(":")[1]) + len(self.server.sequences)
        length = self.server.probe.rows if prefix is not None else 0
        state = SequenceState(number, 1, length)
        self.server.sequences[number] = state
        return state, PrefixMatch(length, "all")

    def _hand_over(self, sequence_id):
        self.call("hand_over")

    def stats(self):
        self.call("stats")

        class Stats:
            kv_bytes_total, kv_bytes_used, page_groups_used, page_groups_cached = 1000, 100, 4, 1
            sequences = len(self.server.sequences)
        return Stats

    def sequences(self):
        return list(self.server.sequences.values())

    def _match(self, sequence_id, epoch, first_row, prefix):
        self.call("match")
        return self.server.sequences[sequence_id], PrefixMatch()

    def _fork(self, sequence_id, epoch, length, request_id, lease_ms):
        raise NotImplementedError

    _truncate = _read_tail = _fork

    def _release(self, sequence_ids):
        self.call("release")
        self.server.released.extend(sequence_ids)
        return [one for one in sequence_ids if self.server.sequences.pop(one, None) is None]

    def renew_leases(self, lease_ms=0):
        self.call("renew")
        return len(self.server.sequences)

    def _get(self, sequence_ids):
        self.call("get")
        found = [self.server.sequences[one] for one in sequence_ids
                 if one in self.server.sequences]
        return found, [one for one in sequence_ids if one not in self.server.sequences]

    def _found(self, sequence_id):
        found, _ = self._get([sequence_id])
        if not found:
            raise errors.NotFound("gone", errors.ErrorDetail(reason="sequence_not_found"))
        return found[0]

    def _look(self, sequence):
        self.call("look")

    def attach(self, model, sequence_id, *, lease_ms=0):
        self.call("attach")
        return Sequence(model, self._found(sequence_id))

    def server_info(self):
        self.call("info")

        class Info:
            capabilities = ("checkpoints",) if self.server.checkpoints else ()
        return Info

    def restore(self, model, sequence_ids, *, lease_ms=0):
        self.call("restore")
        missing = [one for one in sequence_ids if one not in self.server.checkpoints]
        if missing:
            raise errors.NotFound("no checkpoint")
        return [Sequence(model, SequenceState(one, 7, self.server.checkpoints[one]))
                for one in sequence_ids]

    def export_rows(self, sequence, first_row=0, end_row=None):
        self.call("export")
        return iter([b"%d" % sequence.length])

    def import_rows(self, model, parts, *, behind=None, lease_ms=0):
        self.call("import")
        rows = sum(int(part) for part in parts)
        state = SequenceState(999, 3, rows)
        self.server.sequences[999] = state
        return Sequence(model, state)

    def _probe(self, model_id, prefix, timeout_s):
        self.call("probe")
        self.check(model_id)
        probe = self.server.probe
        return lambda: probe

    def _begin(self, step):
        self.call("begin")
        return self

    def _attend(self, step, args):
        self.call("attend")
        ids = np.repeat([one.id for one in step.sequences], step.rows)
        rows = ids[args.row_begin:args.row_begin + args.rows].astype(np.float32)
        # What came with a row goes back with it, so that rows that change places are seen.
        sent = args.q[:, 0, 0] if args.q is not None else np.zeros(args.rows, np.float32)
        o = np.broadcast_to((rows * 1000 + sent)[:, None, None],
                            (args.rows, args.num_heads, 4)).copy()
        lse = np.broadcast_to(sent[:, None], (args.rows, args.num_heads)).copy()
        late = self.server.errors.get("answer")
        return Answer(late or AttendResult(o, lse if args.want_lse else None, []))

    def _end(self, step, committed, tails):
        self.call("end")
        kept = step.rows if committed is None else committed
        lengths = [one.length + rows for one, rows in zip(step.sequences, kept)]
        for one, length in zip(step.sequences, lengths):
            self.server.sequences[one.id] = SequenceState(one.id, one.epoch, length)
        return lengths

    def _abort(self, step):
        self.call("abort")

    def _give_up(self, step):
        self.server.calls.append("give_up")


class Fleet:
    """Servers, and a client of all of them. It does nothing in other threads unless `threads` says
    so."""

    def __init__(self, count=4, **options):
        self.now = 1000.0
        self.servers = {f"s:{number}": FakeServer(f"s:{number}")
                        for number in range(1, count + 1)}
        self.away = None
        self.members = MemberList(self.read, now=lambda: self.now)
        self.members.refresh()
        self.client = ClusterClient(
            self.members, lambda member: FakeClient(self.servers[member.address]),
            client_id="worker", now=lambda: self.now, **{"threads": 0, **options})
        self.model = self.client.register_model(SPEC) if count else None

    def read(self):
        if self.away is not None:
            raise self.away
        return [server.member() for server in self.servers.values()]

    def sequences(self, count):
        """One on each server."""
        made = []
        for server in list(self.servers.values())[:count]:
            made.append(self.client.model_at(server.address, self.model).open_sequence())
            server.calls.clear()
        return made
