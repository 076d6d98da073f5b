"""Rows out of a server and into one, through Python's client."""

import asyncio
import contextlib
import io
import itertools
import tempfile
import threading
import time
import unittest

import mla_client
import numpy as np
import server_binary
from mla_client import Profile, aio, pages
from mla_client.pages.events import EventKind
from mla_client.pages.hints import HintKind, HintOutcome

GEOMETRY = mla_client.Geometry(2, 16, 8)
SPEC = mla_client.ModelSpec("m", GEOMETRY, layers=2, softmax_scale=0.5, page_size=4)


class Case(unittest.TestCase):
    """A sequence of 11 rows on the first of two servers."""

    @classmethod
    def setUpClass(cls):
        cls.servers = [server_binary.start() for _ in range(2)]

    @classmethod
    def tearDownClass(cls):
        for server in cls.servers:
            server.stop()

    def connect(self, server=0):
        client = mla_client.Client.connect(self.servers[server].target)
        self.addCleanup(client.close)
        return client

    def setUp(self):
        self.rng = np.random.default_rng(7)
        self.client = self.connect()
        self.model = self.client.register_model(SPEC)
        self.sequence = self.model.open_sequence()
        self.addCleanup(self.release)
        kv = self.values(2, 11, GEOMETRY.row_dim)
        with self.client.step([(self.sequence, 11)]) as step:
            for layer in range(2):
                step.attend(layer, None, kv[layer], Profile.APPEND_ONLY)

    def release(self):
        with contextlib.suppress(mla_client.MlaError):  # its server may have ended
            self.sequence.release()

    def values(self, *shape):
        return mla_client.round_to_bf16(self.rng.standard_normal(shape))

    def probe(self, client, sequence):
        """The outputs of one more row, which is not kept."""
        rng = np.random.default_rng(8)
        kv, q = (mla_client.round_to_bf16(rng.standard_normal(shape))
                 for shape in ((1, GEOMETRY.row_dim), (1, 2, GEOMETRY.row_dim)))
        with client.step([(sequence, 1)]) as step:
            outputs = [step.attend(layer, q, kv, Profile.ABSORBED, o_dtype=mla_client.DType.F32).o
                       for layer in range(2)]
            step.abort()
        return np.array(outputs)


class PagesTest(Case):
    def test_rows_go_to_another_server_and_mean_the_same(self):
        other = self.connect(1)
        model = other.register_model(SPEC)
        want = self.probe(self.client, self.sequence)
        with other.import_rows(model, self.client.export_rows(self.sequence)) as copy:
            self.assertEqual(copy.length, 11)
            np.testing.assert_array_equal(self.probe(other, copy), want)
            self.assertIn(copy.id, [state.sequence_id for state in other.sequences()])

    def test_rows_go_through_a_file_range_by_range(self):
        files = [io.BytesIO(), io.BytesIO()]
        pages.write(files[0], self.client.export_rows(self.sequence, 0, 8))
        pages.write(files[1], self.client.export_rows(self.sequence, 8))
        for file in files:
            file.seek(0)
        with self.client.import_rows(self.model, pages.read(files[0])) as copy:
            self.assertEqual(copy.length, 8)
            same = self.client.import_rows(self.model, pages.read(files[1]), behind=copy)
            self.assertIs(same, copy)
            self.assertEqual(copy.length, 11)
            np.testing.assert_array_equal(self.probe(self.client, copy),
                                          self.probe(self.client, self.sequence))

    def test_torn_and_foreign_files_are_refused_and_leave_nothing(self):
        file = io.BytesIO()
        pages.write(file, self.client.export_rows(self.sequence))
        whole = file.getvalue()
        before = len(self.client.sequences())
        broken = {"end": whole[:-1], "half": whole[:len(whole) // 2], "more": whole + b"x",
                  "foreign": b"x" + whole[1:], "empty": b"",
                  "older": whole[:8] + b"\0\0\0\0" + whole[12:]}
        for name, content in broken.items():
            with self.subTest(name), self.assertRaises(mla_client.DataLoss):
                self.client.import_rows(self.model, pages.read(io.BytesIO(content)))
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        with self.assertRaises(mla_client.MlaError):
            self.client.import_rows(self.model, pages.read(io.BytesIO(flipped)))
        self.assertEqual(len(self.client.sequences()), before)

    def test_a_file_with_a_key_is_of_those_who_have_it(self):
        key, other = b"k" * 32, b"o" * 32
        file = io.BytesIO()
        pages.write(file, self.client.export_rows(self.sequence), key)
        whole = file.getvalue()
        with self.client.import_rows(self.model, pages.read(io.BytesIO(whole), key)) as copy:
            self.assertEqual(copy.length, self.sequence.length)
        plain = io.BytesIO()
        pages.write(plain, self.client.export_rows(self.sequence))
        for name, content, given in (("none", whole, None), ("other", whole, other),
                                     ("plain", plain.getvalue(), key),
                                     ("end", whole[:-1], key)):
            with self.subTest(name), self.assertRaises(mla_client.DataLoss):
                list(pages.read(io.BytesIO(content), given))
        for at in range(12, len(whole), 1 + len(whole) // 50):
            changed = bytearray(whole)
            changed[at] ^= 1
            with self.subTest(at), self.assertRaises(mla_client.DataLoss):
                list(pages.read(io.BytesIO(changed), key))
        for bad in (b"short", b""):  # an empty file of a key, too
            with self.subTest(bad), self.assertRaises(ValueError):
                pages.write(io.BytesIO(), [], bad)
            with self.subTest(bad), self.assertRaises(ValueError):
                list(pages.read(io.BytesIO(plain.getvalue()), bad))

    def test_rows_of_other_weights_are_refused(self):
        other = self.client.register_model(mla_client.ModelSpec(
            "other", GEOMETRY, layers=2, softmax_scale=0.5, page_size=4, weights_digest=b"d" * 32))
        self.assertEqual(other.spec.weights_digest, b"d" * 32)
        with self.assertRaises(mla_client.FailedPrecondition) as refused:
            self.client.import_rows(other, self.client.export_rows(self.sequence))
        self.assertEqual((refused.exception.detail.reason, refused.exception.detail.field),
                         ("import_differs", "part.header.model.weights_digest"))

    def test_ranges_begin_at_a_page(self):
        with self.assertRaises(mla_client.InvalidArgument):
            list(self.client.export_rows(self.sequence, 3))
        with self.assertRaises(mla_client.InvalidArgument):
            list(self.client.export_rows(self.sequence, 0, 12))

    def test_the_same_for_asyncio(self):
        async def run():
            async with aio.AsyncService(self.client) as service:
                parts = await service.export_rows(self.sequence, 4)
                self.assertGreater(len(parts), 3)
                copy = await service.import_rows(
                    self.model, await service.export_rows(self.sequence, 0, 4))
                await service.import_rows(self.model, parts, behind=copy)
                self.assertEqual(copy.length, 11)
                await service.release(copy)
        asyncio.run(run())


class EventsTest(Case):
    first_tokens = itertools.count(0, 100)

    def setUp(self):
        super().setUp()
        first = next(self.first_tokens)  # for each test, because cached rows are not stored again
        self.tokens = list(range(first, first + 11))
        self.sequence.match(mla_client.Prefix(self.tokens))

    def test_events_are_numbered_and_go_on_where_a_reader_was(self):
        seen = [event for event in next(self.client.watch_events(after=0))
                if event.sequence_id == self.sequence.id]
        self.assertEqual([(event.kind, event.first_row, event.rows) for event in seen],
                         [(EventKind.STORED, 0, 4), (EventKind.STORED, 4, 4)])
        self.assertEqual(seen[1].parent, seen[0].key)
        self.assertEqual(seen[1].number, seen[0].number + 1)
        self.assertEqual(next(self.client.watch_events(seen[0].number))[0], seen[1])
        watch = self.client.watch_events()
        self.assertEqual(next(watch), [])
        self.sequence.release()  # the rest of its last page can be found from now on
        last, = next(watch)
        self.assertEqual((last.number, last.kind, last.first_row, last.rows, last.key),
                         (seen[1].number + 1, EventKind.STORED, 8, 3, b""))
        watch.close()

    def test_misses_are_explained(self):
        other = [*self.tokens[:4], 99999, 98, 97, 96]
        with self.model.open_sequence(prefix=mla_client.Prefix(other)) as missed:
            miss = self.client.explain()[0]
            self.assertEqual(miss[:6], ("m", missed.id, 0, 8, 4, "diverged"))
        with self.model.open_sequence(prefix=mla_client.Prefix(self.tokens[:8])) as found:
            self.assertEqual(found.length, 8)
        self.assertEqual(self.client.explain(most=1), [miss])

        async def run():
            async with aio.AsyncService(self.client) as service:
                return await service.explain(1)
        self.assertEqual(asyncio.run(run()), [miss])

    def test_other_tenants_see_nothing(self):
        other = mla_client.Client.connect(self.servers[0].target, tenant="other")
        self.addCleanup(other.close)
        self.assertEqual(next(other.watch_events(after=0)), [])
        self.assertEqual(other.explain(), [])
        # As operators, which all callers of this host are here, they see everything.
        seen = {event.tenant for event in next(other.watch_events(after=0, all_tenants=True))}
        self.assertIn("default", seen)
        with self.model.open_sequence(prefix=mla_client.Prefix([99] * 8)):
            self.assertEqual(other.explain(1, all_tenants=True)[0].tenant, "default")
        with self.assertRaises(mla_client.InvalidArgument):
            next(other.watch_events(after=7, all_tenants=True))

    def test_events_for_asyncio(self):
        async def run():
            async with aio.AsyncService(self.client) as service:
                watch = service.watch_events()
                self.assertEqual(await watch.__anext__(), [])
                latest = asyncio.ensure_future(watch.__anext__())
                await service.release(self.sequence)  # stores the rest of its last page
                event, = await latest
                self.assertEqual((event.kind, event.first_row, event.rows),
                                 (EventKind.STORED, 8, 3))
                await watch.aclose()
                with self.assertRaises(StopAsyncIteration):
                    await watch.__anext__()
                # A task that waits for events can be cancelled without leaving a thread.
                other = service.watch_events(after=event.number)
                self.assertEqual(await other.__anext__(), [])
                waiting = asyncio.ensure_future(other.__anext__())
                await asyncio.sleep(0.05)
                waiting.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await waiting
            for _ in range(100):
                if not any(thread.name.startswith("mla-events")
                           for thread in threading.enumerate()):
                    return
                await asyncio.sleep(0.05)
            self.fail("the threads of watches live on")
        asyncio.run(run())


class HintsTest(Case):
    """Hints for a sequence and for a prefix, with a slower tier and without one."""

    first_tokens = itertools.count(50_000, 100)

    @classmethod
    def setUpClass(cls):
        cls.servers = [server_binary.start("--tiers-host-bytes=16MiB"), server_binary.start()]

    def setUp(self):
        super().setUp()
        first = next(self.first_tokens)
        self.prefix = mla_client.Prefix(list(range(first, first + 8)))
        self.sequence.match(self.prefix)  # two whole pages

    def hint(self, kind, target=None, **options):
        return self.client.hint(kind, target or (self.model, self.prefix), **options)

    def until(self, kind, outcome, **options):
        for _ in range(200):
            answer = self.hint(kind, **options)
            if answer.outcome == outcome:
                return answer
            time.sleep(0.02)
        self.fail(f"{answer} after 4 s")

    def test_rows_are_pinned_retained_and_let_go(self):
        done = (HintOutcome.ACCEPTED, 8, 8, 0, "")
        self.assertEqual(self.hint(HintKind.PIN, self.sequence, ttl_ms=60_000), done)
        self.assertEqual(self.hint(HintKind.RETAIN, self.sequence, priority=2), done)
        self.sequence.release()
        self.assertEqual(self.hint(HintKind.DEMOTE), (HintOutcome.REFUSED, 8, 0, 0, "in_use"))
        self.assertEqual(self.hint(HintKind.PIN, ttl_ms=0), done)
        self.assertEqual(self.hint(HintKind.RETAIN, priority=0).outcome, HintOutcome.ACCEPTED)

    def test_rows_leave_the_pool_and_come_back(self):
        self.assertEqual(self.hint(HintKind.DEMOTE, self.sequence),
                         (HintOutcome.REFUSED, 8, 0, 0, "in_use"))
        self.sequence.release()
        self.until(HintKind.DEMOTE, HintOutcome.ACCEPTED)
        answer = self.until(HintKind.PREFETCH, HintOutcome.ACCEPTED)
        self.assertEqual(answer.rows_done, 8)
        self.until(HintKind.DEMOTE, HintOutcome.ACCEPTED)
        # Open waits until the rows it names are restored.
        with self.model.open_sequence(prefix=self.prefix) as again:
            self.assertEqual(again.matched, mla_client.PrefixMatch(8, "all"))

    def test_what_is_not_cached_or_not_there_is_said(self):
        unknown = (self.model, mla_client.Prefix([7] * 4))
        for kind in (HintKind.PIN, HintKind.PREFETCH):
            self.assertEqual(self.hint(kind, unknown, **({"ttl_ms": 1000} if kind == 1 else {})),
                             (HintOutcome.REFUSED, 4, 0, 0, "absent"))
        with self.connect(1) as other:
            model = other.register_model(SPEC)
            answer = other.hint(HintKind.DEMOTE, (model, self.prefix))
            self.assertEqual(answer, (HintOutcome.REFUSED, 8, 0, 0, "no_tiers"))

    def test_bad_hints_are_refused(self):
        for kind, options, field in ((0, {}, "kind"), (9, {}, "kind"),
                                     (HintKind.PIN, {"ttl_ms": 1 << 31}, "ttl_ms"),
                                     (HintKind.RETAIN, {"priority": 4}, "priority")):
            with self.assertRaises(mla_client.InvalidArgument) as refused:
                self.hint(kind, **options)
            self.assertEqual(refused.exception.detail.field, field)
        self.sequence.release()
        with self.assertRaises(mla_client.NotFound):
            self.hint(HintKind.RETAIN, self.sequence, priority=1)

    def test_the_same_for_asyncio(self):
        async def run():
            async with aio.AsyncService(self.client) as service:
                return await service.hint(HintKind.PIN, self.sequence, ttl_ms=1000)
        answer = asyncio.run(run())
        self.assertEqual((answer.outcome, answer.rows_done), (HintOutcome.ACCEPTED, 8))


class CheckpointsTest(Case):
    """A server with a folder for checkpoints that starts again."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.servers = [cls.start(), server_binary.start()]

    @classmethod
    def start(cls):
        return server_binary.start(f"--checkpoint-path={cls.folder.name}/saved")

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        cls.folder.cleanup()

    def test_sequences_outlive_the_server(self):
        want = self.probe(self.client, self.sequence)
        saved, = self.client.checkpoint([self.sequence])
        self.assertEqual((saved.sequence_id, saved.length, saved.model_id),
                         (self.sequence.id, 11, "m"))
        self.servers[0].stop()
        self.servers[0] = self.start()
        client = self.connect()
        model = client.register_model(SPEC)
        sequence, = client.restore(model, [saved.sequence_id])
        self.assertEqual((sequence.id, sequence.length), (saved.sequence_id, 11))
        np.testing.assert_array_equal(self.probe(client, sequence), want)
        with self.assertRaises(mla_client.AlreadyExists):
            client.restore(model, [saved.sequence_id])
        self.assertEqual(client.checkpoints(), [saved])
        self.assertEqual(client.drop_checkpoints([saved.sequence_id, 1]), 1)
        sequence.release()
        with self.assertRaises(mla_client.NotFound) as refused:
            client.restore(model, [saved.sequence_id])
        self.assertEqual(refused.exception.detail.reason, "checkpoint_not_found")

    def test_checkpoints_for_asyncio(self):
        async def run():
            async with aio.AsyncService(self.client) as service:
                saved, = await service.checkpoint([self.sequence])
                await service.release(self.sequence)
                sequence, = await service.restore(self.model, [saved.sequence_id])
                self.assertEqual(sequence.length, 11)
                await service.release(sequence)
                self.assertEqual(await service.checkpoints(), [saved])
                self.assertEqual(await service.drop_checkpoints([saved.sequence_id, 1]), 1)
                self.assertEqual(await service.checkpoints(), [])
        asyncio.run(run())

    def test_sequences_without_rows_are_refused(self):
        with self.model.open_sequence() as empty:
            with self.assertRaises(mla_client.FailedPrecondition) as refused:
                self.client.checkpoint([empty])
        self.assertEqual(refused.exception.detail.reason, "nothing_to_save")


class NoCheckpointsTest(unittest.TestCase):
    def test_a_server_without_a_folder_says_so(self):
        server = server_binary.start()
        self.addCleanup(server.stop)
        with mla_client.Client.connect(server.target) as client:
            with self.assertRaises(mla_client.Unimplemented) as refused:
                client.checkpoints()
            self.assertEqual(refused.exception.detail.reason, "no_checkpoints")
            self.assertNotIn("checkpoints", client.server_info().capabilities)


if __name__ == "__main__":
    unittest.main()
