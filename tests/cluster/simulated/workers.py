"""Workers that run conversations of agents through the product's own cluster client.

A conversation has 43 turns, each of which opens a sequence with all tokens so far, computes what is
missing, generates a few, and releases it. 142k rows at the end, scaled 1:64.
"""

import random

import numpy as np

from mla_client import Geometry, ModelSpec, Prefix, Profile, errors
from mla_client.cluster.client import ClusterClient
from mla_client.cluster.members import MemberList
from mla_client.cluster.placement import Costs
from mla_client.cluster.step import OwnersFailed

from simulated.servers import PAGE, Client, extend, shown

SPEC = ModelSpec("agents", Geometry(1, 1, 0), 1, 1.0, PAGE)
TURNS = 43
ROWS = 142_000 // 64
ROWS_A_TURN = ROWS // TURNS
# A row stands for 64.
COSTS = Costs(prefill_row_s=64 * Costs().prefill_row_s)
SYSTEM_ROWS = 12 * PAGE
# A turn that fails so often in a row was lost without an answer.
MOST_TRIES = 60
PAUSE_S = 0.5


class Agent:
    """One conversation."""

    def __init__(self, rng, systems):
        system = systems[rng.randrange(len(systems))]
        own = np.array([rng.getrandbits(20) for _ in range(ROWS)], np.int32)
        self.all = np.concatenate([system, own])
        self.turn = 0
        self.owner = ""  # the server of the latest turn
        digest, self.shown = 0, np.empty(len(self.all), np.float32)
        for place, token in enumerate(self.all):
            digest = extend(digest, token)
            self.shown[place] = shown(digest)
        # One array for each turn. It must stay, because the world finds digests by its identity.
        self.texts = [self.all[:len(system) + (turn + 1) * ROWS_A_TURN] for turn in range(TURNS)]

    @property
    def text(self):
        """All tokens of the turn."""
        return self.texts[self.turn]


class Worker:
    """A worker with a few agents, whose turns it runs in one batch."""

    def __init__(self, world, number, agents, systems):
        self.world = world
        self.rng = random.Random(world.rng.getrandbits(32))
        self.name = f"worker-{number}"
        self.systems = systems
        self.members = MemberList(world.registry.read, now=lambda: world.now)
        self.client = ClusterClient(
            self.members, lambda member: Client(world, member, self.name), client_id=self.name,
            moved=world.registry.where, costs=COSTS, threads=0, now=lambda: world.now,
            rng=random.Random(world.rng.getrandbits(32)))
        self.read_at = -1.0
        self.model = None
        self.last_error = None
        self.agents = [Agent(self.rng, systems) for _ in range(agents)]
        self.figures = {"turns": 0, "asked": 0, "found": 0, "could": 0, "again": 0, "lost": 0,
                        "tries": 0, "how": {}}

    def refresh(self):
        """As the thread of the members does, once a second."""
        if self.world.now - self.read_at >= 1.0:
            self.read_at = self.world.now
            self.members.refresh()

    def batch(self, size):
        """A turn of some agents."""
        self.refresh()
        chosen = self.rng.sample(self.agents, min(size, len(self.agents)))
        places = {}
        for agent in chosen:
            places[agent] = self.open(agent)
            self.figures["asked"] += len(agent.text)
            self.figures["found"] += places[agent].length
            self.figures["could"] += len(agent.text) - (
                ROWS_A_TURN if agent.turn else len(agent.text) - SYSTEM_ROWS)
        held = self.world.renewing.setdefault(self.name, set())
        held.clear()
        held.update(one.id for one in places.values())
        self.finish(places)
        for agent, sequence in places.items():
            held.discard(sequence.id)
            agent.owner = self.client.address_of(sequence)
            self.world.turns[agent.owner] += 1
            try:
                sequence.release()
            except errors.MlaError:
                pass  # its lease ends
            agent.turn += 1
            self.figures["turns"] += 1
            if agent.turn == TURNS:
                self.agents[self.agents.index(agent)] = Agent(self.rng, self.systems)

    def open(self, agent):
        """A sequence for the turn, wherever."""
        prefix = Prefix(agent.text, max_rows=len(agent.text) - 1)
        for _ in range(MOST_TRIES):
            try:
                if self.model is None:
                    self.model = self.client.register_model(SPEC)
                return self.model.open_sequence(prefix=prefix)
            except errors.MlaError as error:
                self.pause(error)
        raise AssertionError(f"{self.name}: no server takes a sequence: {self.last_error}")

    def pause(self, error):
        """Waits a moment, as a worker does."""
        assert not isinstance(error, (errors.DataLoss, errors.Internal, errors.InvalidArgument)), \
            repr(error)
        self.figures["tries"] += 1
        self.last_error = error
        self.world.advance(PAUSE_S)
        self.refresh()

    def finish(self, places):
        """Computes what is missing, whatever fails, and looks at each output."""
        for _ in range(MOST_TRIES):
            open_ones = {agent: sequence for agent, sequence in places.items()
                         if sequence.length < len(agent.text)}
            if not open_ones:
                return
            self.world.between(self)
            failed = self.one_step(open_ones)
            for agent, sequence in places.items():
                if sequence in failed:
                    self.recover(agent, sequence, failed[sequence])
        raise AssertionError(f"{self.name}: a turn does not end")

    def one_step(self, open_ones):
        """One step over all of them; returns whose owners have failed."""
        rows = [(sequence, len(agent.text) - sequence.length)
                for agent, sequence in open_ones.items()]
        lengths = {sequence: sequence.length for sequence, _ in rows}
        try:
            step = self.client.step(rows, partial=True).begin()
        except OwnersFailed as error:
            return error.failed
        except errors.MlaError as error:
            return {sequence: error for sequence, _ in rows}
        try:
            self.world.between(self)
            kv = np.concatenate([agent.text[sequence.length:] for agent, sequence
                                 in open_ones.items()]).astype(np.float32).reshape(-1, 1)
            out = step.attend(0, kv.reshape(-1, 1, 1), kv, Profile.ABSORBED).o[:, 0, 0]
            at, wrong = 0, []
            failed = dict(getattr(step, "failed", {}))
            for agent, sequence in open_ones.items():
                count = len(agent.text) - lengths[sequence]
                got = out[at:at + count]
                at += count
                if sequence in failed:
                    assert np.isnan(got).all(), "rows of a failed owner look like outputs"
                elif not np.array_equal(got, agent.shown[lengths[sequence]:len(agent.text)]):
                    wrong.append(sequence.id)
            if wrong:
                self.world.faults.append(f"{self.name}: wrong rows in {wrong}")
            self.world.between(self)
            step.end()
            return dict(getattr(step, "failed", {}))
        except OwnersFailed as error:
            return error.failed
        except errors.MlaError as error:
            try:
                step.abort()
            except errors.MlaError:
                pass
            return {sequence: error for sequence, _ in rows}

    def recover(self, agent, sequence, error):
        """Goes on elsewhere."""
        if isinstance(error, errors.ResourceExhausted):
            self.spill(agent, sequence)
            return
        before = sequence.length
        for _ in range(MOST_TRIES):
            try:
                found = self.client.recover(sequence, Prefix(agent.text,
                                                             max_rows=len(agent.text) - 1))
                break
            except errors.MlaError as failure:
                self.pause(failure)
        else:
            raise AssertionError(f"{self.name}: a sequence is not recovered")
        self.world.renewing[self.name].add(sequence.id)
        how = self.figures["how"]
        how[found.how] = how.get(found.how, 0) + 1
        if sequence.length > len(agent.text):
            self.world.faults.append(f"{self.name}: {sequence.length} rows of {len(agent.text)}")
        if found.how in ("alive", "moved") and sequence.length < before:
            self.world.faults.append(f"{self.name}: rows were lost without an answer")
        self.figures["again"] += max(0, before - sequence.length)
        self.figures["lost"] += found.how in ("peer", "none")

    def spill(self, agent, sequence):
        """Its server has no room for more rows: another one begins."""
        try:
            sequence.model.service._release([sequence.id])
        except errors.MlaError:
            pass
        fresh = self.open(agent)
        sequence.model, sequence.id = fresh.model, fresh.id
        sequence.epoch, sequence.length = fresh.epoch, fresh.length
        self.world.renewing[self.name].add(sequence.id)
