"""Passes of an engine whose requests are on several servers, as the adapters run them."""

import unittest

import numpy as np

from mla_client import Profile, errors
from mla_client.serving.faults import Fault
from mla_client.serving.link import Link
from mla_client.serving.options import Options
from mla_client.serving.passes import Passes
from mla_client.serving.plan import How, Scheduled
from mla_client.cluster.step import ClusterStep

from fakes import ROW, SPEC, Fleet

GONE = errors.Unavailable("no connection")


class FleetOptions(Options):
    """Options that lead to a fleet."""

    def connect(self, target):
        return self.arguments["fleet"].client


class AdaptersTest(unittest.TestCase):
    def setUp(self):
        self.fleet = Fleet(2)
        self.weights = []
        self.link = Link(FleetOptions(("a:1,b:1",), "m", arguments={"fleet": self.fleet}))
        self.link.start(SPEC, None)
        self.passes = Passes(self.link, 1)

    def begin(self):
        """A pass of two requests, each on a server of its own."""
        home = self.fleet.client.home
        other = next(one for one in self.fleet.servers if one != home)
        self.passes.begin([Scheduled("a", 0, 1, None, 1)])
        self.done()
        self.fleet.servers[home].errors["open"] = errors.ResourceExhausted("no pages")
        made = self.passes.begin([Scheduled("a", 1, 1, None, 1), Scheduled("b", 0, 2, None, 2)],
                                 number=1)
        del self.fleet.servers[home].errors["open"]
        return made, home, other

    def done(self):
        made = self.passes.current
        rows = sum(part.end - part.begin for part in made.sent())
        made.step.attend(0, np.zeros((rows, 2, ROW), np.float32),
                         np.zeros((rows, ROW), np.float32), Profile.ABSORBED)
        self.passes.layer_done(made)
        self.passes.end()

    def test_a_pass_is_a_step_over_all_owners(self):
        made, _, _ = self.begin()
        self.assertIsInstance(made.step, ClusterStep)
        self.assertEqual(made.step.owners, 2)
        self.assertTrue(made.whole)
        self.done()
        self.assertEqual((self.passes.length("a"), self.passes.length("b")), (2, 2))

    def test_a_server_that_fails_loses_its_own_requests(self):
        _, home, other = self.begin()
        self.done()
        client = self.link.client
        self.fleet.servers[other].error = GONE
        made = self.passes.begin([Scheduled("a", 2, 1, None, 1), Scheduled("b", 2, 1, None, 2)],
                                 number=2)
        self.assertEqual([part.how for part in made.parts], [How.SENT, How.VOID])
        self.done()
        self.assertEqual(self.passes.lost(), ["b"])
        self.assertEqual(self.passes.length("a"), 3)
        self.assertIs(self.link.client, client)  # it was not given up
        self.fleet.now += 1
        made = self.passes.begin([Scheduled("b", 0, 3, None, 3)], number=3)
        self.done()
        self.assertEqual(self.passes.length("b"), 3)
        self.assertEqual(client.address_of(self.passes._requests["b"].sequence), home)

    def test_a_fleet_without_servers_is_away(self):
        self.assertEqual(self.link.failed(GONE), Fault.LOST)
        away = errors.Unavailable("none", errors.ErrorDetail(reason="no_servers"))
        self.assertEqual(self.link.failed(away), Fault.AWAY)

    def test_room_is_that_of_all_servers(self):
        stats = self.fleet.client.stats()
        self.assertEqual((stats.kv_bytes_total, stats.page_groups_used), (2000, 8))
        self.fleet.servers["s:1"].error = GONE
        self.assertEqual(self.fleet.client.stats().kv_bytes_total, 1000)
        self.fleet.servers["s:2"].error = GONE
        with self.assertRaises(errors.Unavailable):
            self.fleet.client.stats()

    def test_a_sequence_that_was_opened_for_another_process_is_found_there(self):
        state, _ = self.fleet.client._open("m", "", 0, None)
        self.fleet.client._hand_over(state.sequence_id)
        found = self.fleet.model.adopt_sequence(state.sequence_id)
        self.assertEqual(found.id, state.sequence_id)

    def test_weights_come_to_each_server_once_and_are_not_kept(self):
        fleet, sent = Fleet(3), []
        link = Link(FleetOptions(("a:1,b:1",), "m", arguments={"fleet": fleet}))

        def weights(layer):
            sent.append(layer)
            return np.zeros((2, 0, 4), np.float32), np.zeros((2, 4, 0), np.float32)
        fleet.client.owners.at(fleet.client.home).forget_model("m")
        link.start(SPEC, weights)
        self.assertEqual(sent, [0])
        for address in fleet.servers:
            fleet.client.model_at(address, fleet.client.models_known["m"])
        self.assertEqual(sent, [0, 0, 0])
        self.assertEqual(fleet.client.models_known["m"].uploads, {})

    def test_a_model_whose_lease_has_ended_on_a_server_is_registered_again(self):
        fleet = Fleet(1)
        server = fleet.servers["s:1"]
        server.errors["open"] = errors.NotFound(
            "no model", errors.ErrorDetail(reason="model_not_found"))
        with self.assertRaises(errors.NotFound):
            fleet.model.open_sequence()
        del server.errors["open"]
        before = len(server.registered)
        fleet.model.open_sequence()
        self.assertEqual(len(server.registered), before + 1)


if __name__ == "__main__":
    unittest.main()
