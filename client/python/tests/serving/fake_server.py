"""A server that keeps nothing but lengths, and can be killed, filled and restarted: faults that a
real one cannot be made to have in a given call."""

import types

from mla_client import errors
from mla_client.serving import Options
from mla_client.service import Model, Service
from mla_client.types import Geometry, ModelSpec, PrefixMatch, SequenceState, WeightsStatus

SPEC = ModelSpec("m", Geometry(2, 4, 2, 2, 2), 2, 1.0, 4)


class FakeServer:
    """One server of one model; a page is `page` rows."""

    def __init__(self, pages=1 << 20, page=4):
        self.pages, self.page = pages, page
        self.boot = 0
        self.alive = True
        self.boots()

    def boots(self):
        """Starts again, with nothing."""
        self.boot += 1
        self.alive = True
        self.models, self.sequences, self.steps, self.names = {}, {}, {}, {}
        self.uploads = set()

    def used(self):
        """Pages that sequences and open steps take."""
        rows = {key: one["length"] for key, one in self.sequences.items()}
        for step in self.steps.values():
            for key, new in step:
                rows[key] += new
        return sum(-(-count // self.page) for count in rows.values())


class FakeClient(Service):
    """A connection, which does not outlive the server's process."""

    timeout_s = 1.0
    generations = 0

    def __init__(self, server):
        if not server.alive:
            raise errors.Unavailable("connection refused")
        self.server, self.boot, self.closed = server, server.boot, False
        self.fail_next = None  # raised by the next attend
        self.refuse_next = None  # the answer to the next begin that goes ahead
        self.begun_ahead = []  # steps
        self.followed = []     # ids of steps that followed another one

    def _there(self):
        if self.closed:
            raise ValueError("Cannot invoke RPC on closed channel!")
        if not self.server.alive:
            raise errors.Unavailable("the shared memory has ended")
        if self.server.boot != self.boot:
            raise errors.ServerRestarted("the server restarted: all sequences are gone")
        return self.server

    def close(self):
        self.closed = True

    def server_info(self):
        self._there()
        return types.SimpleNamespace(limits=types.SimpleNamespace(kv_cache_bytes=1 << 20))

    def stats(self):
        server = self._there()
        return types.SimpleNamespace(kv_bytes_total=server.pages * 64, page_groups_cached=0,
                                     page_groups_used=server.used())

    def models(self):
        return list(self._there().models.values())

    def sequences(self):
        return [self._state(key) for key in self._there().sequences]

    def _state(self, key):
        server = self._there()
        one = server.sequences.get(key)
        if one is None:
            raise errors.NotFound("gone", errors.ErrorDetail(reason="sequence_not_found"))
        return SequenceState(key, one["epoch"], one["length"],
                             in_step=any(key in dict(step) for step in server.steps.values()))

    def _register(self, spec, lease_ms, kv_scales, sinks):
        self._there().models[spec.model_id] = spec
        return spec, 64

    def _unregister(self, model_id):
        server = self._there()
        if server.sequences:
            raise errors.FailedPrecondition("model_in_use")
        server.models.pop(model_id, None)
        server.uploads.clear()

    def _upload(self, spec, layer, head_begin, w_uk, w_uv):
        self._there().uploads.add((layer, head_begin))
        return WeightsStatus(True, [], 0)

    def _open(self, model_id, request_id, lease_ms, prefix):
        server = self._there()
        if model_id not in server.models:
            raise errors.NotFound(model_id, errors.ErrorDetail(reason="model_not_found"))
        key = server.names.get(request_id)
        if key not in server.sequences:
            key = server.names[request_id] = max([0, *server.names.values()]) + 1
            server.sequences[key] = {"length": 0, "epoch": 1}
        return self._state(key), PrefixMatch()

    def _get(self, sequence_ids):
        found = [self._state(key) for key in sequence_ids if key in self._there().sequences]
        return found, [key for key in sequence_ids if key not in self.server.sequences]

    def _truncate(self, sequence_id, length, epoch):
        one = self._there().sequences[sequence_id]
        if one["epoch"] != epoch:
            raise errors.FailedPrecondition("epoch_mismatch")
        one["length"], one["epoch"] = length, epoch + 1
        return epoch + 1, length

    def _release(self, sequence_ids):
        server = self._there()
        for key in sequence_ids:
            server.sequences.pop(key, None)
            for number, step in list(server.steps.items()):
                if key in dict(step):
                    del server.steps[number]
        return []

    def _begin(self, step):
        server = self._there()
        entries = [(one.id, rows) for one, rows in zip(step.sequences, step.rows)]
        if step.step_id in server.steps:
            server.steps[step.step_id] = entries
            step.joined = 2
            return self
        for one, rows in zip(step.sequences, step.rows):
            state = self._state(one.id)
            if (state.length, state.epoch, state.in_step) != (one.length, one.epoch, False):
                raise errors.FailedPrecondition(
                    f"sequence {one.id}", errors.ErrorDetail(reason="position_mismatch"))
        server.steps[step.step_id] = entries
        if server.used() > server.pages:
            del server.steps[step.step_id]
            raise errors.ResourceExhausted("pages", errors.ErrorDetail(reason="pages_exhausted"))
        step.joined = 1
        return self

    def _begin_ahead(self, step):
        """The server takes it at once, and its answer is seen later."""
        failure, self.refuse_next = self.refuse_next, None
        self.begun_ahead.append(step)
        try:
            if failure is None:
                self._begin(step)
        except errors.MlaError as error:
            failure = error

        def wait():
            if failure is not None:
                raise failure
        return self, wait

    def _end_ahead(self, step, committed):
        answer = failure = None
        try:
            answer = self._end(step, committed, [])
        except errors.MlaError as error:
            failure = error

        def wait():
            if failure is not None:
                raise failure
            return answer
        return wait

    def _go_on(self, step):
        """A step that follows, whose begin and end are calls of its chain."""
        (chain,) = step._chains
        step.step_id += 1
        self.followed.append(step.step_id)
        _, wait_begin = self._begin_ahead(step)
        waits = [wait_begin]
        chain.waits = waits
        chain.end = lambda: waits.append(self._end_ahead(step, None))
        return True

    def attend(self, step):
        """A layer of a step; raises the planted error."""
        failure, self.fail_next = self.fail_next, None
        if failure is not None:
            raise failure
        if step.step_id not in self._there().steps:
            raise errors.NotFound("step", errors.ErrorDetail(reason="step_not_found"))

    def _end(self, step, committed, tails):
        server = self._there()
        entries = server.steps.pop(step.step_id, None)
        if entries is None:
            raise errors.NotFound("step", errors.ErrorDetail(reason="step_not_found"))
        kept = committed or [rows for _, rows in entries]
        for (key, _), rows in zip(entries, kept):
            server.sequences[key]["length"] += rows
        return [server.sequences[key]["length"] for key, _ in entries]

    def _abort(self, step):
        self._there().steps.pop(step.step_id, None)

    def _none(self, *args, **kwargs):
        raise AssertionError("not called by the core")

    _match = _fork = _read_tail = _attend = _upload_scales = _upload_sinks = _none


class FakeOptions(Options):
    """Options whose targets are servers of `servers`, by name."""

    servers = {}

    def connect(self, target):
        return FakeClient(self.servers[target])


def options(server, **changes):
    """Options for one server."""
    made = FakeOptions(("s",), "m", **changes)
    object.__setattr__(made, "servers", {"s": server})
    return made


def model_of(client):
    """The model as the client has it."""
    return Model(client, SPEC, 64)
