"""Options, tables of versions, pauses, links and admission of the core."""

import concurrent.futures
import os
import pathlib
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock

import numpy as np

from mla_client import errors
from mla_client.serving import link as link_module
from mla_client.serving import (Admission, Event, Fault, How, Link, Options, Passes, Pause, Ranks,
                                Release, Request, Scheduled, State, check_version, fault_of,
                                salt_of, salt_of_rows)
from mla_client.serving.states import MOVES
from serving.fake_server import SPEC, FakeServer, options

TABLE = (Release((0, 25, 1), (0, 25, 1), "pages"), Release((0, 29, 0), (0, 32, 0)))
# The core's lines, as a part of the adapters' lines: what is shared is written once.
LEAST_SHARE = 0.6
WEIGHTS = np.zeros((2, 2, 4)), np.zeros((2, 4, 2))


class Clock:
    """Seconds that a test sets."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Read(list):
    """Tokens that count those which are taken."""

    count = 0

    def __getitem__(self, index):
        got = super().__getitem__(index)
        self.count += len(got) if isinstance(index, slice) else 1
        return got

    def __iter__(self):
        self.count += len(self)
        return super().__iter__()


class Given(unittest.TestCase):
    def test_options_name_what_is_wrong(self):
        for given, text in (
                ({}, "target: got None"), ({"target": []}, "target: got []"),
                ({"target": ["a", 3]}, "target: got"), ({"target": ""}, "target: got ''"),
                ({"target": "a", "prefix_cache": 1}, "prefix_cache: got 1"),
                ({"target": "a", "projected": "yes"}, "projected: got 'yes', must be true"),
                ({"target": "a", "projected": True, "projected_dtype": "fp8"},
                 "projected_dtype: got 'fp8', must be"),
                ({"target": "a", "projected_dtype": "bf16"}, "got 'bf16' without projected"),
                ({"target": "a", "page_size": 1.5}, "page_size: got 1.5"),
                ({"target": "a", "away_s": True}, "away_s: got True"),
                ({"target": "a", "away_s": -1}, "away_s: got -1, must be 0..3600")):
            with self.assertRaisesRegex(errors.InvalidArgument, text.replace("[", r"\[")):
                Options.of(given, "m", "c")
        with self.assertRaisesRegex(errors.InvalidArgument, "does not have: .*colour"):
            Options.of({"target": "unix:/nowhere", "colour": 1}, "m", "c").connect("unix:/nowhere")

    def test_options_keep_what_the_client_takes(self):
        made = Options.of({"target": ["a", "b"], "model_id": "x", "tenant": "t"}, "m", "c")
        self.assertEqual((made.targets, made.model_id, made.arguments["tenant"],
                          made.arguments["client_id"]), (("a", "b"), "x", "t", "c"))
        self.assertEqual(made.of_stage(1, 2).model_id, "x#2of2")
        self.assertFalse(made.projected)
        made = Options.of({"target": "a", "projected": True}, "m", "c")
        self.assertEqual((made.projected, made.projected_dtype), (True, ""))
        made = Options.of({"target": "a", "projected": True, "projected_dtype": "bf16"}, "m", "c")
        self.assertEqual((made.projected_dtype, set(made.arguments)),
                         ("bf16", {"lease_ms", "client_id"}))

    def test_versions_outside_of_the_table_are_refused(self):
        for version, note in (("0.25.1", "pages"), ("0.29.0", ""), ("0.30.3+cpu", ""),
                              ("0.32.0", "")):
            self.assertEqual(check_version("vLLM", version, TABLE).note, note)
        for version in ("0.25.0", "0.28.9", "0.32.1", "0.33.0", "1.0", "dev", ""):
            with self.assertRaisesRegex(errors.Unimplemented,
                                        "was tried with 0.25.1, 0.29.0 to 0.32.0"):
                check_version("vLLM", version, TABLE)

    def test_salt_depends_on_every_part(self):
        base = {"a": 1, "b": ["x"]}
        salts = {salt_of(parts) for parts in (
            base, {**base, "a": 2}, {**base, "b": ["x", "y"]}, {"a": 1}, {**base, "c": None})}
        self.assertEqual(len(salts), 5)
        self.assertEqual(salt_of(base), salt_of({"b": ["x"], "a": 1}))

    def test_salt_depends_on_the_files_of_a_folder(self):
        """Another checkpoint in the same folder may have the same attention, and other rows."""
        with tempfile.TemporaryDirectory() as folder:
            def salt(model=folder, **text):
                return salt_of_rows("engine", "1", model, types.SimpleNamespace(**text), dtype="x")
            path = pathlib.Path(folder) / "model.safetensors"
            path.write_bytes(b"weights")
            os.utime(path, ns=(1, 1))
            salts = [salt(), salt()]
            os.utime(path, ns=(1, 2))
            salts.append(salt())
            path.write_bytes(b"weights more")
            os.utime(path, ns=(1, 2))
            salts.append(salt())
            (pathlib.Path(folder) / "more.safetensors").write_bytes(b"")
            salts += [salt(), salt(rope_parameters={"a": 1}), salt("name/model"),
                      salt("name/model", _commit_hash="c"), salt("other/model")]
        self.assertEqual(salts[0], salts[1])
        self.assertEqual(len(set(salts)), len(salts) - 1)

    def test_heads_of_ranks(self):
        self.assertEqual([Ranks(rank, 4).heads(16) for rank in range(4)],
                         [(0, 4), (4, 4), (8, 4), (12, 4)])
        self.assertEqual([Ranks(rank, 2).sends_rows for rank in range(2)], [True, False])
        with self.assertRaises(errors.InvalidArgument):
            Ranks(0, 3).heads(16)
        with self.assertRaises(errors.InvalidArgument):
            Ranks(2, 2)

    def test_pause_grows_to_a_bound_and_ends(self):
        clock = Clock()
        pause = Pause(1.0, 4.0, clock)
        lasting = []
        for _ in range(6):
            pause.failed()
            begin = clock.now
            while not pause.over:
                clock.now += 0.25
            lasting.append(clock.now - begin)
        self.assertTrue(all(low <= got <= high for got, low, high in zip(
            lasting, (0.5, 1, 2, 2, 2, 2), (1, 2, 4, 4, 4, 4))), lasting)
        self.assertGreater(pause.lasts_s, 0)
        pause.well()
        self.assertEqual((pause.over, pause.lasts_s), (True, 0.0))

    def test_states_refuse_moves_that_are_not_in_the_table(self):
        for state in State:
            for event in Event:
                request = Request("r")
                request.state = state
                if (state, event) in MOVES:
                    request.move(event)
                    self.assertEqual(request.state, MOVES[state, event])
                else:
                    with self.assertRaisesRegex(errors.Internal, "r: .* while it is"):
                        request.move(event)

    def test_faults(self):
        for error, fault in ((errors.Unavailable("x"), Fault.AWAY),
                             (errors.ServerRestarted("x"), Fault.AWAY),
                             (errors.NotFound("x"), Fault.LOST),
                             (errors.ResourceExhausted("x"), Fault.NO_ROOM),
                             (errors.InvalidArgument("x"), Fault.OTHER)):
            self.assertEqual(fault_of(error), fault)


class Linked(unittest.TestCase):
    def setUp(self):
        self.server = FakeServer()
        self.clock = Clock()
        self.link = Link(options(self.server), pause=Pause(1.0, 4.0, self.clock))

    def test_weights_come_again_after_a_restart(self):
        self.link.start(SPEC, lambda layer: WEIGHTS)
        self.assertEqual(len(self.server.uploads), SPEC.layers)
        self.server.boots()
        self.assertEqual(self.link.failed(errors.ServerRestarted("gone")), Fault.AWAY)
        self.link.model()
        self.assertEqual(len(self.server.uploads), SPEC.layers)

    def test_a_dead_server_is_left_alone_for_a_while(self):
        self.link.start(SPEC, None)
        self.server.alive = False
        self.link.failed(errors.Unavailable("gone"))
        with self.assertRaisesRegex(errors.Unavailable, "connection refused"):
            self.link.model()
        self.server.boots()
        with self.assertRaisesRegex(errors.Unavailable, "connection refused"):
            self.link.model()  # too early
        self.clock.now += 2.0
        self.assertEqual(self.link.model().spec.model_id, "m")
        self.assertEqual(self.link.absent_s, 0.0)

    def test_a_server_that_drains_is_left_for_the_next(self):
        other = FakeServer()
        made = options(self.server)
        object.__setattr__(made, "targets", ("s", "t"))
        object.__setattr__(made, "servers", {"s": self.server, "t": other})
        link = Link(made, pause=Pause(1.0, 4.0, self.clock))
        link.start(SPEC, None)
        self.assertEqual((len(self.server.models), len(other.models)), (1, 0))
        link.failed(errors.Unavailable("drains", errors.ErrorDetail(reason="draining")))
        link.model()
        self.assertEqual((len(self.server.models), len(other.models)), (0, 1))

    def test_look_says_where_it_has_looked(self):
        self.server.alive = False
        with self.assertRaisesRegex(errors.Unavailable, "target s: connection refused"):
            self.link.look()

    def test_the_end_releases_the_model(self):
        for keep, left in ((False, 0), (True, 1)):
            link = Link(options(self.server, keep_model=keep))
            link.start(SPEC, None)
            link.close()
            self.assertEqual(len(self.server.models), left)

    def test_a_model_that_another_engine_releases_in_the_meantime_is_registered_again(self):
        self.link.start(SPEC, lambda layer: WEIGHTS)
        ending = [self.link]

        class Late(type(self.link.client)):
            def _upload(self, *args):
                if ending:
                    ending.pop().close()
                    raise errors.NotFound("not registered",
                                          errors.ErrorDetail(reason="model_not_found"))
                return super()._upload(*args)
        made = options(self.server)
        object.__setattr__(made, "connect", lambda target: Late(self.server))
        Link(made).start(SPEC, lambda layer: WEIGHTS)
        self.assertEqual(list(self.server.models), [SPEC.model_id])

    def test_another_checkpoint_under_the_name_gets_in(self):
        self.link.start(SPEC, lambda layer: WEIGHTS)
        refusals = [errors.AlreadyExists("other values")]

        class Other(type(self.link.client)):
            def _upload(self, *args):
                if refusals:
                    raise refusals.pop()
                return super()._upload(*args)
        made = options(self.server)
        object.__setattr__(made, "connect", lambda target: Other(self.server))
        again = Link(made)
        again.start(SPEC, lambda layer: WEIGHTS)
        self.assertFalse(refusals)
        self.assertEqual(len(self.server.uploads), SPEC.layers)

    def test_another_checkpoint_waits_for_the_leases_of_an_engine_that_was_killed(self):
        self.link.start(SPEC, lambda layer: WEIGHTS)
        in_use = [errors.FailedPrecondition("open sequences",
                                            errors.ErrorDetail(reason="model_in_use"))] * 2
        refusals = [errors.AlreadyExists("other values")]

        class Other(type(self.link.client)):
            def _upload(self, *args):
                if refusals:
                    raise refusals.pop()
                return super()._upload(*args)

            def _unregister(self, model_id):
                if in_use:
                    raise in_use.pop()
                super()._unregister(model_id)
        made = options(self.server)
        object.__setattr__(made, "connect", lambda target: Other(self.server))
        with mock.patch.object(link_module, "REPLACE_PAUSE_S", 0.0):
            Link(made).start(SPEC, lambda layer: WEIGHTS)
        self.assertFalse(refusals + in_use)
        self.assertEqual(len(self.server.uploads), SPEC.layers)

    def test_another_checkpoint_is_refused_while_its_engine_goes_on(self):
        self.link.start(SPEC, lambda layer: WEIGHTS)

        class Other(type(self.link.client)):
            def _upload(self, *args):
                raise errors.AlreadyExists("other values")

            def _unregister(self, model_id):
                raise errors.FailedPrecondition("open sequences",
                                                errors.ErrorDetail(reason="model_in_use"))
        made = options(self.server)
        object.__setattr__(made, "connect", lambda target: Other(self.server))
        with mock.patch.object(link_module, "REPLACE_S", -1.0):
            with self.assertRaisesRegex(errors.FailedPrecondition, "open sequences"):
                Link(made).start(SPEC, lambda layer: WEIGHTS)


class Admitted(unittest.TestCase):
    def setUp(self):
        self.start(pages=4)

    def start(self, pages):
        self.server = FakeServer(pages=pages)
        self.worker = Link(options(self.server), pause=Pause(0.0, 0.0))
        self.worker.start(SPEC, None)
        self.clock = Clock()
        self.admission = Admission(Link(options(self.server), pause=Pause(0.0, 0.0)), "s", False,
                                   now=self.clock)
        self.passes = Passes(self.worker, SPEC.layers, name="e")

    def run_pass(self, rows, gone=()):
        plan = self.admission.plan(rows, gone)
        made = self.passes.begin(plan.scheduled, plan.gone, plan.said, plan.number)
        for _ in range(SPEC.layers):
            self.passes.layer_done(made)
        self.passes.end()
        return made

    def test_a_request_waits_for_room_and_gets_it(self):
        self.assertEqual(self.admission.admit("a", range(7)), 0)
        self.assertEqual(self.admission.admit("b", range(7)), 0)
        self.assertIsNone(self.admission.admit("c", range(7)))  # all promised room is in use
        self.run_pass({"a": (0, 7), "b": (0, 7)})
        self.clock.now += 1
        self.assertIsNone(self.admission.admit("c", range(7)))
        self.run_pass({"b": (7, 1)}, gone=["a"])
        self.clock.now += 1
        self.assertEqual(self.admission.admit("c", range(7)), 0)
        self.assertEqual(self.admission.counts["waits"], 2)

    def test_a_request_waits_for_rows_that_it_shares_with_a_prompt_under_way(self):
        """It would compute them in the same pass, while an engine's own cache finds them."""
        self.start(pages=32)
        page, link = SPEC.page_size, Link(options(self.server), pause=Pause(0.0, 0.0))
        admission = self.admission = Admission(link, "s", follows=True)
        first = list(range(page)) + [90]
        self.assertEqual(admission.admit("a", first), 0)
        same = list(range(page)) + [91, 92]
        self.assertIsNone(admission.admit("b", same))
        self.assertEqual(admission.admit("c", same, "of another tenant"), 0)
        self.assertEqual(admission.admit("d", [80] + same), 0)  # no whole page is shared
        self.assertEqual(admission.admit("e", same, finds=False), 0)
        self.run_pass({"a": (0, len(first))}, gone=["c", "d", "e"])
        self.assertIsNone(admission.admit("b", same))
        self.run_pass({"a": (len(first), 1)})
        self.assertIsNotNone(admission.admit("b", same))
        self.assertEqual((admission.counts["follows"], admission.counts["waits"]), (2, 0))

    def test_tokens_are_compared_once_with_those_of_a_prompt_under_way(self):
        """An engine asks before each of the many passes of a long prompt."""
        page = SPEC.page_size
        self.start(pages=64)
        admission = self.admission = Admission(
            Link(options(self.server), pause=Pause(0.0, 0.0)), "s", follows=True)
        first = list(range(20 * page))
        self.assertEqual(admission.admit("a", first), 0)
        same = Read(first[:10 * page] + [3] + first[:page])
        for turn in range(5):
            self.assertIsNone(admission.admit("b", same))
            self.assertEqual(same.count, 11 * page, f"turn {turn}")  # and the page that differs
        longer = Read(first[:2 * page + 1])
        self.assertIsNone(admission.admit("c", longer))
        longer.extend(first[2 * page + 1:4 * page + 1])  # only what is new is compared
        for _ in range(2):
            self.assertIsNone(admission.admit("c", longer))
            self.assertEqual(longer.count, 4 * page)
        # Its name may come again with other tokens, but not before it is gone.
        self.run_pass({"a": (0, page)}, gone=["b"])
        other = Read([9] + first)
        self.assertEqual(admission.admit("b", other), 0)
        self.run_pass({"a": (page, 3 * page)})
        self.assertIsNone(admission.admit("c", longer))
        self.run_pass({"a": (4 * page, page)})
        self.assertIsNotNone(admission.admit("c", longer))

    def test_a_request_does_not_wait_for_one_that_is_gone(self):
        link = Link(options(self.server), pause=Pause(0.0, 0.0))
        self.admission = Admission(link, "s", follows=True)
        tokens = range(SPEC.page_size + 1)
        self.assertEqual(self.admission.admit("a", tokens), 0)
        self.assertIsNone(self.admission.admit("b", tokens))
        self.run_pass({}, gone=["a"])
        self.assertEqual(self.admission.admit("b", tokens), 0)

    def test_the_newest_goes_without_where_there_is_no_room(self):
        self.run_pass({"a": (0, 8), "b": (0, 7)})
        made = self.run_pass({"a": (8, 1), "b": (7, 2)})
        self.assertEqual([part.how for part in made.parts], [How.SENT, How.VOID])
        self.assertEqual(self.passes.lost(), ["b"])
        self.assertEqual(self.passes.lost(), [])

    def test_the_worker_goes_on_by_itself_while_the_server_is_away(self):
        self.server.alive = False
        made = self.run_pass({"a": (0, 3)})
        self.assertEqual([part.how for part in made.parts], [How.LOCAL])
        self.assertEqual(self.passes.lost(), [])  # its outputs are right
        made = self.run_pass({"a": (3, 1)})
        self.assertEqual([part.how for part in made.parts], [How.VOID])
        self.assertEqual(self.passes.lost(), ["a"])
        self.server.boots()
        made = self.run_pass({"a": (0, 4)})
        self.assertTrue(made.whole)

    def test_waiting_ends(self):
        self.assertTrue(self.admission.patient)
        self.server.alive = False
        impatient = Admission(Link(options(self.server, away_s=0.0)), "s", False)
        self.assertFalse(impatient.patient)
        self.assertEqual(impatient.admit("a", range(3)), 0)  # it fails with its pass
        self.assertIsNone(self.admission.admit("a", range(3)))

    def test_what_was_not_taken_is_released(self):
        self.admission.admit("a", range(3))
        self.assertEqual(len(self.server.sequences), 1)
        self.admission.close()
        self.assertEqual(len(self.server.sequences), 0)

    def test_the_last_of_an_engine_releases_the_model(self):
        """A worker ends before its scheduler, whose reservations keep the model until then."""
        for keep in (False, True):
            server = FakeServer()
            worker = Link(options(server, keep_model=keep))
            worker.start(SPEC, None)
            admission = Admission(Link(options(server, keep_model=keep)), "s", False)
            admission.admit("waits", range(3))
            worker.close()
            self.assertEqual(len(server.models), 1)
            admission.close()
            self.assertEqual((len(server.models), len(server.sequences)), (int(keep), 0))

    def test_ranks_share_a_step_and_one_ends_it(self):
        second = Link(options(self.server), Ranks(1, 2), Pause(0.0, 0.0))
        second.start(SPEC, None)
        first = Link(options(self.server), Ranks(0, 2), Pause(0.0, 0.0))
        first.start(SPEC, None)
        ranks = [Passes(link, SPEC.layers, name="tp") for link in (first, second)]
        for number, computed, new in ((1, 0, 3), (2, 3, 1), (3, 4, 1)):
            scheduled = [Scheduled("a", computed, new, turn=1)]
            with concurrent.futures.ThreadPoolExecutor() as pool:
                # The one that led waits for no other one, so it may come last.
                order = ranks if number % 2 else ranks[::-1]
                made = dict(zip(order, pool.map(
                    lambda one, of=scheduled, at=number: one.begin(of, number=at), order)))
            self.assertEqual(sorted(one.leads for one in made.values()), [False, True])
            self.assertEqual([one.length("a") for one in ranks], [computed] * 2)
            for of, one in made.items():
                for _ in range(SPEC.layers):
                    of.layer_done(one)
                of.end()
                self.assertEqual(len(self.server.steps), 1, "the other one may come later")
        for one in ranks:  # without requests
            one.begin([], number=4)
        self.assertEqual([one.length("a") for one in ranks], [5] * 2)
        self.assertEqual(self.server.steps, {})
        for one in ranks:
            one.release(["a"])
        self.assertEqual(self.server.sequences, {})


class Packaged(unittest.TestCase):
    def test_the_core_imports_no_engine_and_no_torch(self):
        code = ("import sys; import mla_client.serving; "
                "print([m for m in ('torch','vllm','sglang','transformers') if m in sys.modules])")
        got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                             check=True, env={"PYTHONPATH": ":".join(sys.path)})
        self.assertEqual(got.stdout.strip(), "[]")

    def test_the_core_has_most_of_what_adapters_need(self):
        package = pathlib.Path(link_module.__file__).parents[1]

        def lines(name):
            return sum(len(path.read_text(encoding="utf-8").splitlines())
                       for path in (package / name).glob("*.py"))
        adapters = sum(map(lines, ("vllm", "sglang", "transformers")))
        self.assertGreater(lines("serving"), LEAST_SHARE * adapters)


if __name__ == "__main__":
    unittest.main()
