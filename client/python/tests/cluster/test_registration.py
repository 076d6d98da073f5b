"""Registrations of models with a cluster: where models come, and what a repeat sends."""

import dataclasses
import unittest

from mla_client import errors
from mla_client.cluster.owners import FIRST_PAUSE_S
from mla_client.types import SequenceState

from fakes import SPEC, FakeServer, Fleet

GONE = errors.Unavailable("no connection")


class RegistrationTest(unittest.TestCase):
    def test_what_was_uploaded_comes_to_servers_that_are_used_later(self):
        fleet = Fleet(3)
        fleet.model.upload_scales([1.0])
        self.assertEqual([len(one.uploads) for one in fleet.servers.values()].count(1), 1)
        for address in fleet.servers:
            fleet.client.model_at(address, fleet.model)
        self.assertEqual([one.uploads for one in fleet.servers.values()], [[(1.0,)]] * 3)

    def test_servers_that_fill_in_what_a_spec_leaves_open_are_sent_nothing_twice(self):
        fleet = Fleet(3, home="s:1")
        fleet.servers["s:2"].e4m3 = False
        spec = dataclasses.replace(SPEC, model_id="p", projected_dtype="e4m3")
        for _ in range(3):
            model = fleet.client.register_model(spec)
            for address in fleet.servers:
                fleet.client.model_at(address, model)
        model.upload_scales([1.0])
        for _ in range(3):
            for address in fleet.servers:
                fleet.client.model_at(address, model).open_sequence()
            fleet.client.register_model(spec).open_sequence()
        for address, server in fleet.servers.items():
            self.assertEqual(server.uploads, [(1.0,)], address)

    def test_a_repeat_renews_the_lease_where_the_model_is(self):
        fleet = Fleet(3, home="s:1")
        fleet.client.model_at("s:2", fleet.model)
        fleet.model.upload_scales([1.0])
        one, two, three = fleet.servers.values()
        one.expired.add("m")
        fleet.client.register_model(SPEC)
        # The first answer of a server that had lost it says so.
        self.assertEqual([len(server.registered) for server in (one, two, three)], [3, 2, 0])
        self.assertEqual([len(server.uploads) for server in (one, two, three)], [2, 1, 0])
        two.error = GONE
        again = fleet.client.register_model(SPEC, lease_ms=1000)
        self.assertEqual([len(server.uploads) for server in (one, two, three)], [2, 1, 0])
        two.error = None
        two.expired.add("m")
        one.errors["open"] = errors.ResourceExhausted("no pages")
        three.errors["open"] = errors.ResourceExhausted("no pages")
        fleet.now += 60
        fleet.client.register_model(SPEC)
        self.assertEqual(fleet.client.address_of(again.open_sequence()), "s:2")
        self.assertEqual([len(server.uploads) for server in (one, two)], [2, 2])

    def test_a_repeat_uploads_where_another_client_has_made_the_model_again(self):
        fleet = Fleet(1)
        fleet.model.upload_scales([1.0])
        server = fleet.servers["s:1"]
        # Between a question to the server and the registration, say.
        server.instances["m"] += 1
        fleet.client.register_model(SPEC)
        self.assertEqual(server.uploads, [(1.0,)] * 2)
        server.calls.clear()
        fleet.client.register_model(SPEC)
        self.assertEqual(server.uploads, [(1.0,)] * 2)
        self.assertEqual(server.calls, ["register"])

    def test_a_repeat_without_an_answer_is_followed_by_uploads(self):
        fleet = Fleet(1)
        fleet.model.upload_scales([1.0])
        server = fleet.servers["s:1"]
        server.expired.add("m")
        server.errors["registered"] = errors.DeadlineExceeded("no answer")
        with self.assertRaises(errors.DeadlineExceeded):
            fleet.client.register_model(SPEC)
        del server.errors["registered"]
        fleet.model.open_sequence()
        self.assertEqual(server.uploads, [(1.0,)] * 2)

    def test_a_sequence_opened_during_a_repeat_is_of_a_model_with_its_uploads(self):
        fleet = Fleet(1)
        fleet.model.upload_scales([1.0])
        server = fleet.servers["s:1"]

        def repeat():
            server.during_open = None
            server.expired.add("m")
            server.errors["scales"] = errors.ResourceExhausted("no memory for now")
            with self.assertRaises(errors.ResourceExhausted):
                fleet.client.register_model(SPEC)
            del server.errors["scales"]
            server.calls.clear()
        server.during_open = repeat
        fleet.model.open_sequence()
        self.assertEqual(server.calls, ["register", "scales"])
        self.assertEqual(server.uploads, [(1.0,)] * 2)

    def test_an_older_release_is_asked_whether_it_has_the_model(self):
        fleet = Fleet(0)
        fleet.servers["s:1"] = FakeServer("s:1")
        fleet.servers["s:1"].older = True
        fleet.members.refresh()
        fleet.client.register_model(SPEC).upload_scales([1.0])
        server = fleet.servers["s:1"]
        fleet.client.register_model(SPEC)
        self.assertEqual(server.uploads, [(1.0,)])
        server.expired.add("m")
        fleet.client.register_model(SPEC)
        self.assertEqual(server.uploads, [(1.0,)] * 2)
        self.assertEqual(server.calls.count("probe"), 2)

    def restarted(self, fleet, address):
        """The process of a server that is connected is another one from now on."""
        server = fleet.servers[address]
        server.old.add(fleet.client.owners.at(address).client)
        server.registered.clear()
        return server

    def test_a_home_that_has_restarted_is_tried_first(self):
        fleet = Fleet(3, home="s:1")
        fleet.model.upload_scales([1.0])
        home = self.restarted(fleet, "s:1")
        fleet.client.register_model(SPEC)
        self.assertEqual(home.uploads, [(1.0,)] * 2)
        # Calls that follow go there, too, without a pause.
        self.assertEqual(fleet.client.address_of(fleet.model.open_sequence()), "s:1")
        self.restarted(fleet, "s:1")
        self.assertEqual(fleet.client.address_of(fleet.model.open_sequence()), "s:1")
        self.restarted(fleet, "s:1")
        self.assertEqual(fleet.client.address_of(fleet.model.open_sequence()), "s:1")
        home = self.restarted(fleet, "s:1")
        home.sequences[9] = SequenceState(9, 1, 0)
        self.assertEqual(fleet.client.address_of(fleet.client.attach(fleet.model, 9)), "s:1")
        for server in list(fleet.servers.values())[1:]:
            self.assertEqual(server.registered, [])

    def test_a_home_that_restarts_twice_in_a_call_is_left_for_the_first_pause(self):
        fleet = Fleet(2, home="s:1")
        fleet.servers["s:1"].error = errors.ServerRestarted("another process")
        fleet.client.register_model(SPEC)
        fleet.servers["s:1"].error = None
        home = fleet.client.owners.at("s:1")
        self.assertFalse(home.well)
        fleet.now += FIRST_PAUSE_S + 2 * FIRST_PAUSE_S  # one pause a failure
        self.assertTrue(home.well)
        fleet.now -= FIRST_PAUSE_S
        self.assertTrue(home.well)

    def test_a_repeat_takes_nothing_back(self):
        fleet = Fleet(3, home="s:1")
        fleet.client.register_model(SPEC, lease_ms=1000, kv_scales=[2.0])
        again = fleet.client.register_model(SPEC)
        fleet.client.model_at("s:2", again)
        used = [fleet.servers["s:1"], fleet.servers["s:2"]]
        for server in used:
            self.assertEqual(server.terms, (1000, [2.0]))
        # The server keeps uploaded scales until another registration sets scales.
        again.upload_scales([3.0])
        again = fleet.client.register_model(SPEC)
        for server in used:
            self.assertEqual(server.asked, (0, []))
            self.assertEqual(server.terms, (1000, [3.0]))
        again = fleet.client.register_model(SPEC, kv_scales=[4.0])
        fleet.client.model_at("s:3", again)
        for server in fleet.servers.values():
            self.assertEqual(server.terms, (1000, [4.0]))

    def test_uploads_stay_where_the_home_becomes_another_kind_of_server(self):
        fleet = Fleet(2, home="s:1")
        fleet.servers["s:2"].e4m3 = False
        spec = dataclasses.replace(SPEC, model_id="p", projected_dtype="e4m3")
        fleet.client.register_model(spec).upload_scales([1.0])
        fleet.servers["s:1"].error = GONE
        fleet.client.register_model(spec)
        self.assertEqual(fleet.servers["s:2"].uploads, [(1.0,)])
        fleet.servers["s:1"].error = None
        fleet.client.model_at("s:1", fleet.client.register_model(spec))
        self.assertEqual(fleet.servers["s:2"].uploads, [(1.0,)])


if __name__ == "__main__":
    unittest.main()
