"""Answers of a server that is newer than the client, or that is not an mla-server."""

import threading
import time
import unittest
import unittest.mock

import grpc
import mla_client
import numpy as np
from hostile_server import BOOT_ID, HostileServer, info, registered, sequence
from mla_client import DataLoss, Geometry, ModelSpec, Prefix, Profile, PrefixMatch
from mla_client.errors import DETAIL_KEY
from mla_client.gen import (admin_pb2, attention_pb2, cache_pb2, error_pb2, model_pb2, sequence_pb2)

SPEC = ModelSpec("m", Geometry(2, 8, 4, 4, 4), 1, 0.5, attention="sparse_v4", window=8, ratios=(4,),
                 tail_bytes=10)
WAIT_S = 60
Reply = attention_pb2.AttendStreamReply


class HostileTest(unittest.TestCase):
    def setUp(self):
        self.server = HostileServer()
        self.addCleanup(self.server.close)
        self.answers = self.server.answers
        self.client = mla_client.Client.connect(self.server.target, timeout_s=WAIT_S)
        self.addCleanup(self.client.close)

    def answer(self, name, reply):
        """The server's answer from now on: a message, or a function of request and context."""
        self.answers[name] = reply if callable(reply) else lambda *_: reply

    def wrong(self, what):
        """A context in which a DataLoss must be raised that names the fault."""
        return self.assertRaisesRegex(DataLoss, what)


class CallsTest(HostileTest):
    def model(self):
        return self.client.register_model(SPEC)

    def test_numbers_that_are_not_known_are_kept(self):
        def newer(request, _context):
            reply = registered(request)
            reply.model.query_precision, reply.model.fp8_compute = 17, 18
            reply.model.entry_format = 19
            return reply
        self.answer("Register", newer)
        spec = self.model().spec
        self.assertEqual((spec.query_precision, spec.fp8_compute, spec.entry_format),
                         ("17", "18", "19"))
        listed = model_pb2.ModelSpec(model_id="n", kv_format=21, attention=-5, query_precision=3)
        self.answer("List", model_pb2.ListModelsReply(boot_id=BOOT_ID,
                                                      models=[model_pb2.ModelInfo(model=listed)]))
        (spec,) = self.client.models()
        self.assertEqual((spec.kv_format, spec.attention, spec.query_precision), ("21", "-5", "3"))
        self.answer("Register", lambda request, _: registered(request))
        # A model of a newer server can be registered again as it is.
        self.assertEqual(self.client.register_model(
            ModelSpec("n", Geometry(2, 8, 4), 1, 0.5, kv_format="21")).spec.kv_format, "21")
        for name in ("nonsense", "-5", "2"):
            with self.assertRaisesRegex(mla_client.InvalidArgument, "kv_format"):
                self.client.register_model(ModelSpec("n", Geometry(2, 8, 4), 1, 0.5,
                                                     kv_format=name))

    def test_quotas(self):
        usage = admin_pb2.QuotaUsage(name="kv_bytes", used=1, bound=2, source=9)
        tenant = admin_pb2.TenantQuota(tenant="t", resources=[usage])
        self.answer("GetQuota", admin_pb2.GetQuotaReply(boot_id=BOOT_ID, tenants=[tenant],
                                                        server=[usage]))
        self.assertEqual(self.client.quota().resources["kv_bytes"].source, "9")
        self.assertEqual(self.client.quotas()[1]["kv_bytes"].source, "9")
        self.answer("GetQuota", admin_pb2.GetQuotaReply(boot_id=BOOT_ID))
        with self.wrong("quota.*tenants 0"):
            self.client.quota()

    def test_where_a_match_has_ended(self):
        opened = self.model().open_sequence()
        for number, name in ((5, "deferred"), (6, "6"), (-1, "-1"), (2**31 - 1, "2147483647")):
            self.answer("Match", sequence_pb2.MatchReply(
                boot_id=BOOT_ID, sequence=sequence(),
                match=sequence_pb2.PrefixMatch(rows=0, end=number)))
            self.assertEqual(opened.match(Prefix([1])), PrefixMatch(0, name))
            self.answer("Explain", cache_pb2.ExplainReply(
                boot_id=BOOT_ID, misses=[cache_pb2.CacheMiss(end=number)]))
            self.assertEqual(self.client.explain()[0].end, name)

    def test_a_registration_that_is_another(self):
        for field, value in (("model_id", "x"), ("layers", 2), ("softmax_scale", 0.25),
                             ("top_k", 1), ("window", 9), ("tail_bytes", 11), ("page_size", 0)):
            def changed(request, _context, field=field, value=value):
                reply = registered(request)
                setattr(reply.model, field, value)
                return reply
            self.answer("Register", changed)
            with self.subTest(field=field), self.wrong(f"model.{field}"):
                self.model()
        for field in ("num_heads", "kv_lora_rank", "rope_dim", "nope_dim", "v_dim"):
            def other(request, _context, field=field):
                reply = registered(request)
                setattr(reply.model.geometry, field, 1 << 20)
                return reply
            self.answer("Register", other)
            with self.subTest(field=field), self.wrong(f"model.geometry.{field}.*1048576"):
                self.model()

    def test_other_sequences_than_the_one_that_was_asked_for(self):
        model = self.model()
        opened = model.open_sequence()
        other = sequence(8, length=3)
        self.answer("Get", sequence_pb2.GetReply(boot_id=BOOT_ID, sequences=[other]))
        self.answer("Match", sequence_pb2.MatchReply(boot_id=BOOT_ID, sequence=other))
        self.answer("Fork", sequence_pb2.ForkReply(boot_id=BOOT_ID, sequence=other))
        self.answer("Truncate", sequence_pb2.TruncateReply(boot_id=BOOT_ID, epoch=2, length=9))
        self.answer("Restore", cache_pb2.RestoreReply(boot_id=BOOT_ID, sequences=[other]))
        for call in (opened.refresh, lambda: opened.match(Prefix([1])), lambda: opened.fork(2),
                     lambda: opened.truncate(0), lambda: self.client.restore(model, [7]),
                     lambda: self.client.attach(model, 7), lambda: model.adopt_sequence(7)):
            with self.wrong("sequence|length"):
                call()
        self.assertEqual((opened.id, opened.length, opened.epoch), (7, 0, 1))
        # Answers about other objects are not accepted either.
        self.answer("Release", sequence_pb2.ReleaseReply(boot_id=BOOT_ID, not_found=[8, 9]))
        self.assertEqual(self.client._release([7]), [])
        self.answer("Get", sequence_pb2.GetReply(
            boot_id=BOOT_ID, moved=[sequence_pb2.MovedSequence(sequence_id=8, peer="evil:1")]))
        with self.assertRaises(mla_client.NotFound) as caught:
            opened.refresh()
        self.assertEqual(caught.exception.detail.peer, "")

    def test_lengths_that_no_sequence_has(self):
        model = self.model()
        self.answer("Open", sequence_pb2.OpenReply(boot_id=BOOT_ID,
                                                   sequence=sequence(7, length=2**64 - 1)))
        with self.wrong("length"):
            model.open_sequence()

    def test_tails(self):
        opened = self.model().open_sequence()

        def tail(**fields):
            values = dict(boot_id=BOOT_ID, position=3, serial=1, tail_bytes=10, tail=b"0123456789")
            values.update(fields)
            return sequence_pb2.ReadTailReply(**values)

        self.answer("ReadTail", tail())
        self.assertEqual(opened.read_tail(), (3, b"0123456789"))
        for fields in (dict(tail_bytes=2**63), dict(tail_bytes=2**63, tail=b""),
                       dict(tail_bytes=9), dict(tail_bytes=0, tail=b""), dict(tail=b""),
                       dict(tail=b"0123456789A"), dict(tail_bytes=11)):
            self.answer("ReadTail", tail(**fields))
            with self.subTest(fields=fields), self.wrong("read_tail"):
                opened.read_tail()
        calls = self.server.calls.count("ReadTail")
        self.assertEqual(calls, 8)  # none of the calls was repeated
        parts = [b"0123", b"45", b"6789"]
        self.answer("ReadTail", lambda request, _: tail(tail=parts.pop(0)))
        self.assertEqual(opened.read_tail(), (3, b"0123456789"))
        # Tails that are replaced all the time end with the call's time, not after any number.
        serial = iter(range(10**9))
        self.answer("ReadTail", lambda request, _: tail(tail=b"0", serial=next(serial)))
        with self.assertRaisesRegex(mla_client.Aborted, "other tails"):
            opened.read_tail()

    def test_an_answer_of_no_server_of_this_run(self):
        self.answer("Get", sequence_pb2.GetReply(sequences=[sequence()]))  # without a boot id
        with self.assertRaises(mla_client.AnotherServer):  # the first one answers, too
            self.client.sequences()

    def test_details_that_cannot_be_read(self):
        for detail in (b"\xff\xff\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe"):
            def refuse(_request, context, detail=detail):
                context.set_trailing_metadata(((DETAIL_KEY, detail),))
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no")
            self.answer("Get", refuse)
            with self.subTest(detail=detail), \
                    self.assertRaisesRegex(mla_client.FailedPrecondition, "no") as caught:
                self.client.sequences()
            self.assertEqual(caught.exception.detail, mla_client.ErrorDetail())

    def test_bounds_that_leave_no_room(self):
        def tiny(_request, _context):
            reply = info()
            reply.limits.message_bytes = 0
            return reply
        self.answer("GetServerInfo", tiny)
        with mla_client.Client.connect(self.server.target, timeout_s=WAIT_S) as client, \
                client.register_model(SPEC).open_sequence() as opened, \
                client.step([(opened, 1)]) as step:
            with self.assertRaisesRegex(mla_client.InvalidArgument, "message_bytes"):
                step.attend_window(0, np.zeros((1, 2, 12)), np.zeros((1, 12)))
            step.abort()


class LeasesTest(HostileTest):
    def renewals(self, answer):
        """Renewals are answered so until two more have been asked for; then honestly until one is
        taken. The errors that the client saw in between."""
        seen, enough = [], threading.Event()

        def renew(request, context):
            seen.append(self.client.lease_error)
            if len(seen) < 3:
                return answer(request, context)
            enough.set()
            return sequence_pb2.RenewLeaseReply(boot_id=BOOT_ID, renewed=1)

        def short(_request, _context):
            return sequence_pb2.OpenReply(boot_id=BOOT_ID, sequence=sequence())
        self.answer("RenewLease", renew)
        self.answer("Open", short)
        # Renewals are due soon, and have all the time they need.
        self.client._renewer._renew = lambda _timeout_s: self.client._renew(WAIT_S)
        self.client.register_model(SPEC).open_sequence(lease_ms=90)
        self.assertTrue(enough.wait(WAIT_S))
        deadline = time.monotonic() + WAIT_S
        while self.client.lease_error is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        self.assertIsNone(self.client.lease_error)
        return [str(error) for error in seen[1:3]]

    def test_an_undecodable_detail_ends_no_renewal(self):
        def refuse(_request, context):
            context.set_trailing_metadata(((DETAIL_KEY, b"\xff\xff\xff"),))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a proxy is between")
        errors = self.renewals(refuse)
        self.assertEqual(len(errors), 2)
        for error in errors:
            self.assertIn("a proxy is between", error)

    def test_an_answer_that_is_none_ends_no_renewal(self):
        for error in self.renewals(lambda *_: b"\xff\xff\xff"):
            self.assertIn("INTERNAL", error)

    def test_an_error_that_no_one_foresaw_ends_no_renewal(self):
        with unittest.mock.patch.object(mla_client.errors, "from_rpc",
                                        side_effect=AttributeError("surprise")):
            for error in self.renewals(lambda _, context: context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION, "")):
                self.assertIn("AttributeError: surprise", error)

    def test_tiny_leases_are_no_flood(self):
        self.client._renewer._schedule.add(1, 1e-9, 1e-9, 0.0)
        self.client._renewer._schedule.renewed(True, 5.0)
        self.assertEqual(self.client._renewer._schedule.due(), 5.02)


class StepsTest(HostileTest):
    def setUp(self):
        super().setUp()
        model = self.client.register_model(ModelSpec("m", Geometry(2, 8, 4), 1, 0.5))
        ids = iter((7, 8))
        self.answer("Open", lambda *_: sequence_pb2.OpenReply(boot_id=BOOT_ID,
                                                              sequence=sequence(next(ids))))
        self.sequences = [model.open_sequence(), model.open_sequence()]
        self.step = self.client.step([(self.sequences[0], 1), (self.sequences[1], 2)])

    def test_lengths_of_a_step(self):
        self.step.begin()
        for lengths, what in (([], "0 sequences"), ([1], "1 sequences"), ([1, 2, 3], "3 sequences"),
                              ([2, 1], r"\[2, 1\]"), ([1, 2**63], "lengths")):
            self.answer("end_step", Reply(end_step=attention_pb2.EndStepReply(lengths=lengths)))
            with self.subTest(lengths=lengths), self.wrong(what):
                self.step.end()
            self.assertEqual([one.length for one in self.sequences], [0, 0])
        self.answer("end_step", Reply(end_step=attention_pb2.EndStepReply(lengths=[0, 1])))
        with self.wrong("lengths"):
            self.step.end()  # which keeps all rows
        self.assertEqual(self.step.end([0, 1]), [0, 1])

    def test_answers_of_another_kind(self):
        for reply in (Reply(abort_step=attention_pb2.AbortStepReply()), Reply(),
                      Reply(attend=attention_pb2.AttendReply())):
            self.answer("begin_step", reply)
            with self.wrong("begin_step with"):
                self.step.begin()
        del self.answers["begin_step"]
        self.step.begin()
        q, kv = np.zeros((3, 2, 12)), np.zeros((3, 12))
        for reply in (Reply(abort_step=attention_pb2.AbortStepReply()), Reply(),
                      Reply(end_step=attention_pb2.EndStepReply(lengths=[1, 2]))):
            for profile, queries in ((Profile.ABSORBED, q), (Profile.APPEND_ONLY, None)):
                self.answer("attend", reply)
                with self.wrong("attend with"):
                    self.step.attend(0, queries, kv, profile)
        self.answer("attend", Reply(attend=attention_pb2.AttendReply(), payload=b"short"))
        with self.wrong("payload"):
            self.step.attend(0, q, kv, Profile.ABSORBED)
        self.answer("end_step", Reply(abort_step=attention_pb2.AbortStepReply()))
        with self.wrong("end_step with"):
            self.step.end()

    def test_errors_with_odd_codes(self):
        for code in (0, 17, -3, 2**31 - 1):
            self.answer("begin_step", Reply(error=attention_pb2.StepError(
                code=code, message="odd", detail=error_pb2.ErrorDetail(reason="odd"))))
            with self.assertRaisesRegex(mla_client.Unknown, "odd"):
                self.step.begin()

    def test_a_step_of_other_rows(self):
        given_up = threading.Event()

        def abort(request, _context):
            given_up.set()
            return Reply(abort_step=attention_pb2.AbortStepReply())
        self.answer("abort_step", abort)
        self.answer("begin_step", Reply(begin_step=attention_pb2.BeginStepReply(total_rows=4)))
        with self.wrong("total_rows 4, must be 3"):
            self.step.begin()
        self.assertTrue(given_up.wait(WAIT_S))

    def test_bytes_that_are_no_answer_end_the_stream_alone(self):
        self.answer("begin_step", b"\xff\xff\xff")
        with self.assertRaises(mla_client.Internal):
            self.step.begin()
        del self.answers["begin_step"]
        self.step.begin()  # on another stream
        self.step.abort()


if __name__ == "__main__":
    unittest.main()
