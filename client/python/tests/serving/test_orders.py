"""All orders of what may happen to a request, against a server that keeps lengths: rows sent must
be the rows that the server has, each loss is reported once, and nothing is left over."""

import itertools
import logging
import unittest
from unittest import mock

import numpy as np

from mla_client import errors
from mla_client.serving import Admission, How, Link, Passes, Pause, Requests, State, Worker
from serving.fake_server import SPEC, FakeServer, options

INPUTS = ("client/python",)
DEPTH = 6
EVENTS = ("admit", "pass", "preempt", "abort", "fail", "restart")
PROMPT = 3
WEIGHTS = np.zeros((2, 2, 4)), np.zeros((2, 4, 2))  # W_UK and W_UV of a layer


class Engine:
    """An engine's scheduler and worker, as far as the core sees them."""

    back = 4  # passes after which requests that were lost are there again

    def __init__(self):
        self.server = FakeServer()
        made = options(self.server)
        self.link = Link(made, pause=Pause(0.0, 0.0))
        self.link.start(SPEC, lambda layer: WEIGHTS)
        self.admission = Admission(Link(made, pause=Pause(0.0, 0.0)), "salt", False)
        self.passes = Passes(self.link, SPEC.layers, name="engine")
        self.tokens, self.computed = {}, {}  # tokens of requests: all, and computed ones
        self.running, self.gone = [], []
        self.born = 0
        self.failing = False

    def admit(self):
        self.born += 1
        name = f"r{self.born}"
        self.tokens[name], self.computed[name] = PROMPT, 0
        self.running.append(name)

    def preempt(self):
        if self.running:
            name = self.running[-1]
            self.gone.append(name)
            self.computed[name] = 0

    def abort(self):
        if self.running:
            name = self.running.pop(0)
            self.gone.append(name)
            del self.tokens[name], self.computed[name]

    def fail(self):
        self.failing = True

    def restart(self):
        self.server.boots()

    def happens(self, event):
        self.run() if event == "pass" else getattr(self, event)()

    def run(self):
        """A pass of all that run. A preempted request is there again at once."""
        rows = {}
        for name in self.running:
            if self.computed[name] == 0:
                assert self.admission.admit(name, range(self.tokens[name])) == 0
            rows[name] = self.computed[name], self.tokens[name] - self.computed[name]
        plan = self.admission.plan(rows, self.gone)
        self.gone = []
        made = self.passes.begin(plan.scheduled, plan.gone, plan.said, plan.number)
        self.layers(made)
        self.passes.end()
        self.settle(made, rows)

    def layers(self, made):
        for layer in range(SPEC.layers):
            if made.step is not None:
                for part in made.sent():
                    held = self.server.sequences[self.passes._requests[part.request].sequence.id]
                    assert held["length"] == part.computed, (part, held)
                try:
                    if self.failing and layer == 1:
                        self.failing = False
                        made.step.service.fail_next = errors.Internal("launch_failed")
                    made.step.service.attend(made.step)
                except errors.MlaError as error:
                    self.passes.fail(made, error)
            self.passes.layer_done(made)

    def settle(self, made, rows):
        """The engine's work after a pass: it counts tokens, and begins requests again."""
        lost = self.lost()
        assert len(lost) == len(set(lost)), lost
        for part, name in zip(made.parts, rows):
            if part.how == How.VOID:
                assert name in lost, (part, lost)
            assert part.how != How.LOCAL or part.computed == 0, part
            if name in lost:
                self.computed[name] = 0
            else:
                self.computed[name] += rows[name][1]
                self.tokens[name] += 1
        for name in lost:
            assert name in self.computed, name

    def lost(self):
        return self.passes.lost()

    def known(self, name):
        """The name by which the core knows a request."""
        return name

    def end(self):
        """All requests end; then nothing may be left."""
        for _ in range(self.back):
            self.run()
        for name in self.running:
            state = self.passes.state(self.known(name))
            assert state == State.READY, (name, state)
            assert self.passes.length(self.known(name)) == self.computed[name]
        while self.running:
            self.abort()
        self.run()
        assert not self.server.sequences, self.server.sequences
        assert not self.server.steps, self.server.steps
        assert self.passes._requests == {}


class OneProcess(Engine):
    """As Engine, in one thread: a request that is put back has its rows released at once, and is
    another request to the core afterwards."""

    def __init__(self):
        self.server = FakeServer()
        made = options(self.server)
        made.arguments.update(client_id="engine")
        self.worker = Worker(made)
        self.worker.link._pause = Pause(0.0, 0.0)
        self.worker.start(SPEC, lambda layer: WEIGHTS, lambda passes: None)
        self.passes = self.worker.passes
        self.requests = Requests(self.worker, Admission(self.worker.link, "salt", False))
        self.tokens, self.computed, self.owners = {}, {}, {}
        self.running, self.failing, self.born = [], False, 0

    def preempt(self):
        if self.running:
            self.free(self.running[-1])
            self.computed[self.running[-1]] = 0

    def abort(self):
        if self.running:
            name = self.running.pop(0)
            self.free(name)
            del self.tokens[name], self.computed[name]

    def free(self, name):
        self.requests.freed(name, range(self.tokens[name]))
        self.owners.pop(name, None)

    def run(self):
        rows = {}
        for name in self.in_next():
            if self.computed[name] == 0:
                owner = self.owners.setdefault(name, Owner())
                assert self.requests.admit(name, owner, range(self.tokens[name]), "", False) == 0
                assert not self.requests.waits(name)
            rows[name] = self.computed[name], self.tokens[name] - self.computed[name]
        made = self.requests.begin(list(rows), list(rows.values()))
        self.layers(made)
        self.worker.end()
        self.settle(made, rows)

    def in_next(self):
        """Requests of the next pass."""
        return self.running

    def lost(self):
        found = self.requests.lost(list(self.running))
        for name in found:
            self.requests.leave(name)
            self.put_back(name)
        return found

    def put_back(self, name):
        """It stays the engine's request."""
        self.requests.freed(name, range(self.tokens[name]))

    def known(self, name):
        return self.requests._names[name]


class Overlapping(OneProcess):
    """A pass is launched before the results of the one before it are there. It has the requests
    that this one has lost, which are put back when it is over."""

    back = 8

    def __init__(self):
        super().__init__()
        self.flying = None  # the last pass, its rows, and the names by which the core knows them
        self.out = []       # requests that are in no pass to come

    def in_next(self):
        return [name for name in self.running if name not in self.out]

    def preempt(self):
        if self.running and self.running[-1] not in self.out:
            super().preempt()

    def settle(self, made, rows):
        names = {name: self.known(name) for name in rows}
        for name, (_, new) in rows.items():
            self.computed[name] += new
            self.tokens[name] += 1
        before, self.flying = self.flying, (made, names)
        ready, self.out = self.out, []
        if before is not None:
            self.results(ready, *before)
        for name in ready:
            if name in self.tokens:
                self.put_back(name)
                self.computed[name] = 0

    def results(self, ready, made, names):
        """The results of a pass: requests of it that have ended have none."""
        here = [name for name, known in names.items() if self.requests._names.get(name) == known]
        lost = self.requests.lost(here)
        assert not set(lost) & set(ready), (lost, ready)
        for part, name in zip(made.parts, names):
            if part.how == How.VOID and name in here:
                assert name in lost + ready, (part, lost, ready)
        for name in lost:
            self.requests.leave(name)
            state = self.passes.state(self.known(name))
            assert state == State.OUT, (name, state)
        self.out = lost


class Owner:
    """A request of the engine's."""


class Orders(unittest.TestCase):
    def walk(self, make):
        """Runs all orders of an engine that `make` makes."""
        logging.disable(logging.CRITICAL)
        self.addCleanup(logging.disable, logging.NOTSET)
        count = 0
        with mock.patch("mla_client.serving.passes.AWAY_PAUSE_S", 0.0):
            for order in itertools.product(EVENTS, repeat=DEPTH):
                if order[0] != "admit":
                    continue  # all other events have no effect on an empty engine
                engine = make()
                try:
                    for event in order:
                        engine.happens(event)
                    engine.end()
                except Exception as error:
                    raise AssertionError(f"{order}: {error!r}") from error
                count += 1
        self.assertEqual(count, len(EVENTS) ** (DEPTH - 1))

    def test_all_orders_of_a_scheduler_and_a_worker(self):
        self.walk(Engine)

    def test_all_orders_of_one_process(self):
        self.walk(OneProcess)

    def test_all_orders_of_one_process_whose_passes_overlap(self):
        self.walk(Overlapping)


if __name__ == "__main__":
    unittest.main()
