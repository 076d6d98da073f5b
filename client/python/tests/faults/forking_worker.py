"""A worker that forks, for test_fork.py: prints what became of each scenario, as JSON.

usage: forking_worker.py TARGET TRANSPORT TCP_ADDRESS SCENARIO...
"""

import asyncio
import gc
import json
import os
import signal
import sys
import threading

import mla_client
import numpy as np
from mla_client import Profile
from mla_client.aio import AsyncService
from service_contract import GEOMETRY, LAYERS, SCALE, Worker

LEASE_MS = 60_000
CHILD_S = 60  # a child that hangs ends itself, which counts as a failure


def outcome(call):
    """The result of a call."""
    try:
        call()
        return "ok"
    except mla_client.MlaError as error:
        return error.detail.reason or str(error)


def forked(work, leave=os._exit):
    """Returns the result of `work()` in a child, and the child's status; `leave` ends the child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_S)
        os.close(reader)
        said = json.dumps(work())
        os.write(writer, said.encode())
        os.close(writer)
        leave(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    return json.loads(text) if text else None, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Parent:
    """A client with a sequence, an open step, a request under way and half-read iterators."""

    def __init__(self, target, transport):
        self.worker = Worker()
        self.client = mla_client.Client.connect(target, transport=transport, timeout_s=20.0,
                                                shared_bytes=1 << 20)
        self.model = self.client.register_model(
            mla_client.ModelSpec("forking", GEOMETRY, LAYERS, SCALE, 4))
        self.sequence, self.other = self.model.open_sequence(), self.model.open_sequence()
        self.rows = np.stack([self.worker.kv(9) for _ in range(LAYERS)])
        with self.client.step([(self.other, 9)], lease_ms=LEASE_MS) as step:
            for layer in range(LAYERS):
                step.attend(layer, None, self.rows[layer], Profile.APPEND_ONLY)
        self.parts = self.client.export_rows(self.other)
        next(self.parts)
        self.watch = self.client.watch_events(0)
        next(self.watch)
        self.buffers = self.client.buffers(self.model, 3, Profile.ABSORBED)
        self.step = self.client.step([(self.sequence, 3)], lease_ms=LEASE_MS).begin()
        self.q, self.kv = self.worker.queries(3, Profile.ABSORBED), self.worker.kv(3)
        self.future = self.step.attend_async(0, self.q, self.kv, Profile.ABSORBED)
        self.stream = self.client._stream

    def calls(self):
        """Every call of a client, by name."""
        client, model, sequence = self.client, self.model, self.sequence
        return {
            "server_info": client.server_info, "models": client.models,
            "sequences": client.sequences, "renew_leases": client.renew_leases,
            "quota": client.quota, "transport": lambda: client.transport,
            "open_stream": client.open_stream,
            "buffers": lambda: client.buffers(model, 1, Profile.ABSORBED),
            "register": lambda: client.register_model(model.spec),
            "upload": lambda: model.upload_weights(0, self.worker.w_uk[0], self.worker.w_uv[0]),
            "open": model.open_sequence, "fork": self.other.fork,
            "truncate": lambda: self.other.truncate(1), "refresh": sequence.refresh,
            "match": lambda: self.other.match(mla_client.Prefix([1])),
            "begin": client.step([(self.other, 1)]).begin,
            "begin on the stream": client.step([(self.other, 1)], stream=self.stream).begin,
            "attend": lambda: self.step.attend(1, self.q, self.kv, Profile.ABSORBED),
            "attend in place": lambda: self.step.attend(
                1, self.buffers.q, self.buffers.kv, Profile.ABSORBED, out=self.buffers),
            "result": self.future.result, "end": self.step.end, "abort": self.step.abort,
            "release": sequence.release, "hand over": self.other.hand_over,
            "export": lambda: next(self.parts),
            "another export": lambda: next(client.export_rows(self.other)),
            "import": lambda: client.import_rows(model, [b""]),
            "watch": lambda: next(self.watch), "another watch": lambda: client.watch_events(),
        }

    def closings(self):
        """Calls that end something, by name."""
        return {"stream.close": self.stream.close, "stream.cancel": self.stream.cancel,
                "watch.close": self.watch.close, "buffers.release": self.buffers.release,
                "close": self.client.close}

    def go_on(self):
        """The parent's own step, to its end, on the stream of its begin. Returns true if the
        outputs are correct."""
        want, _ = self.worker.expected(0, self.q, self.kv, Profile.ABSORBED)
        right = np.allclose(self.future.result().o, want, atol=2e-2, rtol=2e-2)
        got = self.step.attend(1, self.q, self.kv, Profile.ABSORBED).o
        right = right and np.allclose(got, want, atol=2e-2, rtol=2e-2)
        right = right and self.step.end() == [3] and self.client._stream is self.stream
        whole = b"".join(self.parts)
        return bool(right and len(whole) > 0 and self.client.lease_error is None)


def every_call(parent):
    """Each call in a child, then closing everything there; the parent goes on."""
    def work():
        said = {name: outcome(call) for name, call in parent.calls().items()}
        said["lease_error"] = parent.client.lease_error.detail.reason
        said["broken"] = parent.stream.broken.detail.reason
        return said, {name: outcome(call) for name, call in parent.closings().items()}
    said = forked(work)
    return {"child": said, "parent": parent.go_on()}


def leaving_blocks(parent):
    """A child that leaves the `with` blocks that it was forked in, by SystemExit."""
    def work():
        try:
            with parent.client, parent.sequence, parent.step, parent.buffers:
                sys.exit(3)
        except SystemExit as error:
            return error.code
    said = forked(work)
    return {"child": said, "parent": parent.go_on()}


def collected(parent):
    """A child that forgets everything, and ends as Python programs do."""
    def work():
        parent.__dict__.clear()
        gc.collect()
        return "collected"
    kept = dict(parent.__dict__)
    said = forked(work, sys.exit)
    parent.__dict__.update(kept)
    return {"child": said, "parent": parent.go_on()}


def locked(parent):
    """A fork while another thread has every lock."""
    stream, held, done = parent.stream, threading.Event(), threading.Event()
    locks = [parent.client._lock, parent.client._opening, parent.client._renewer._lock,
             parent.client._channels._lock,
             getattr(stream, "_mutex", None) or getattr(stream, "_lock"),
             *([stream.memory._lock] if stream.memory else [])]

    def hold():
        for lock in locks:
            lock.acquire()
        held.set()
        done.wait()
        for lock in reversed(locks):
            lock.release()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    said = forked(lambda: [[outcome(call) for call in calls().values()]
                           for calls in (parent.calls, parent.closings)])
    done.set()
    holder.join()
    return {"child": said, "parent": parent.go_on()}


def writing(parent):
    """A child that writes into the parent's buffers."""
    parent.buffers.q[...] = 1

    def work():
        parent.buffers.q[...] = 2
        parent.buffers.kv[...] = 3
        return [int(parent.buffers.q.max()), int(parent.buffers.kv.min())]
    said = forked(work)
    return {"child": said, "parent": parent.go_on(), "q": int(parent.buffers.q.max())}


def awaiting(parent):
    """A child that awaits in a service whose threads only its parent has."""
    service = AsyncService(parent.client)
    calls = {"checkpoints": service.checkpoints, "begin": service.step(
        [(parent.other, 1)]).__aenter__, "close": service.close}
    outcome(lambda: asyncio.run(service.checkpoints()))  # starts its threads
    said = forked(lambda: {name: outcome(lambda: asyncio.run(call()))
                           for name, call in calls.items()})
    asyncio.run(service.close())
    return {"child": said, "parent": parent.go_on()}


def of_a_cluster(parent):
    """A client of a cluster whose members are two addresses of the server. All its threads have
    worked, and are idle."""
    port = sys.argv[3].rpartition(":")[2]
    with mla_client.Client.connect(f"127.0.0.1:{port},localhost:{port}", timeout_s=20.0) as client:
        model = client.register_model(parent.model.spec)
        for member in client.members.all():
            client.model_at(member.address, model)
        together = threading.Barrier(9)
        for _ in range(8):
            client.owners._pool.submit(together.wait)
        together.wait()
        said = forked(lambda: [outcome(client.renew_leases), outcome(lambda: client._release([1]))])
        client.renew_leases()
    return {"child": said, "parent": parent.go_on()}


def outlived(parent):
    """A child that outlives its parent, which prints the child's id and is killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        os.read(reader, 1)  # until the parent has ended
        sys.stdin.read()    # until the test has seen enough
        os._exit(0)
    os.close(reader)
    print(json.dumps({"child": pid}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def compute(target, transport):
    """(outcome, whether the outputs of each step are right) of a client of its own."""
    said, worker = [], Worker(2)

    def work():
        with mla_client.Client.connect(target, transport=transport, timeout_s=20.0,
                                       shared_bytes=1 << 20) as client:
            model = client.register_model(
                mla_client.ModelSpec("forking", GEOMETRY, LAYERS, SCALE, 4))
            q, kv = worker.queries(3, Profile.ABSORBED), worker.kv(3)
            with model.open_sequence() as sequence, \
                    client.step([(sequence, 3)], lease_ms=LEASE_MS) as step:
                for layer in range(LAYERS):
                    o = step.attend(layer, q, kv, Profile.ABSORBED).o
            want, _ = worker.expected(0, q, kv, Profile.ABSORBED)
            said.append(bool(np.allclose(o, want, atol=2e-2, rtol=2e-2)))
    return outcome(work), said


def connecting(parent):
    """A child that connects itself after its parent has."""
    said = forked(lambda: compute(*sys.argv[1:3]))
    return {"child": said, "parent": parent.go_on()}


def main(target, transport, address, *scenarios):
    # A child may connect while its parent has not.
    outcomes = {"connecting first": forked(lambda: compute(target, transport))}
    for name in scenarios:
        parent = Parent(target, transport)
        outcomes[name] = SCENARIOS[name](parent)
        parent.client.close()
    print(json.dumps(outcomes), flush=True)


SCENARIOS = {each.__name__: each for each in (every_call, leaving_blocks, collected, locked,
                                              writing, awaiting, of_a_cluster, outlived,
                                              connecting)}

if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
