"""mla_client.aio: the same outputs, in order, also with other tasks, and nothing left open."""

import asyncio
import dataclasses
import unittest

import mla_client
import numpy as np
import server_binary
from mla_client import Profile
from mla_client.aio import AsyncService
from service_contract import GEOMETRY, LAYERS, SCALE, Worker

ROWS = 12


class AsyncServiceTest(unittest.IsolatedAsyncioTestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = server_binary.start()

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    async def asyncSetUp(self):
        self.client = mla_client.Client.connect(self.server.target, timeout_s=10.0)
        self.addCleanup(self.client.close)
        self.model = self.client.register_model(
            mla_client.ModelSpec("aio", GEOMETRY, LAYERS, SCALE))
        self.service = await AsyncService(self.client).__aenter__()
        self.addAsyncCleanup(self.service.close)
        worker = Worker()
        self.q = worker.queries(ROWS, Profile.ABSORBED)
        self.kv = worker.kv(ROWS)

    async def generate(self, sequence):
        """All rows in one step; outputs of the last layer."""
        async with self.service.step([(sequence, ROWS)]) as step:
            for layer in range(LAYERS):
                result = await step.attend(layer, self.q, self.kv, Profile.ABSORBED)
        return result.o

    def local(self):
        service = mla_client.LocalReference()
        sequence = service.register_model(self.model.spec).open_sequence()
        with service.step([(sequence, ROWS)]) as step:
            for layer in range(LAYERS):
                result = step.attend(layer, self.q, self.kv, Profile.ABSORBED)
        return result.o

    async def test_outputs_are_those_of_the_step_api(self):
        sequence = await self.service.open_sequence(self.model)
        np.testing.assert_allclose(await self.generate(sequence), self.local(), atol=0.02)
        self.assertEqual(sequence.length, ROWS)
        branch = await self.service.fork(sequence, 5)
        self.assertEqual(branch.length, 5)
        await self.service.truncate(sequence, 3)
        self.assertEqual(sequence.length, 3)
        for each in (sequence, branch):
            await self.service.release(each)
        self.assertEqual(self.client.sequences(), [])

    async def test_rows_sent_together_keep_their_order(self):
        sequence = await self.service.open_sequence(self.model)
        async with self.service.step([(sequence, ROWS)]) as step:
            for layer in range(LAYERS):
                parts = await asyncio.gather(*(
                    step.attend(layer, self.q[row:row + 1], self.kv[row:row + 1], Profile.ABSORBED,
                                row_begin=row) for row in range(ROWS)))
        whole = np.concatenate([part.o for part in parts])
        np.testing.assert_allclose(whole, self.local(), atol=0.02)

    async def test_sparse_attention_and_windows(self):
        """Each call is awaited and compared with LocalReference's step API, whose answers follow
        the contract."""
        rng = np.random.default_rng(4)
        spec = mla_client.ModelSpec("aio-sparse", mla_client.Geometry(3, 24, 8), 2, SCALE, 4)
        rows, q = rng.standard_normal((6, 32)), rng.standard_normal((6, 3, 32))
        keys = rng.standard_normal((6, 48))
        indexed = (rng.standard_normal((6, 2, 16)), rng.standard_normal((6, 2)))
        lists = [[row // 2, -1] for row in range(6)]
        sparse = dataclasses.replace(spec, attention="sparse_v32", top_k=2)
        for kind, one, call in (
                ("sparse", sparse, (q, lists, rows, Profile.ABSORBED)),
                ("indexed", dataclasses.replace(sparse, index_heads=2, index_dim=16),
                 (q, *indexed, keys, Profile.ABSORBED)),
                ("window", dataclasses.replace(spec, attention="sparse_v4", window=3,
                                               ratios=(2, 2)), (q, rows, rows[:3]))):
            one = dataclasses.replace(one, model_id=f"aio-{kind}")
            sinks = np.ones((2, 3)) if kind == "window" else ()
            local = mla_client.LocalReference()
            wanted = local.register_model(one, sinks=sinks).open_sequence()
            with local.step([(wanted, 6)]) as step:
                for layer in range(2):
                    want = getattr(step, f"attend_{kind}")(layer, *call)
            sequence = await self.service.open_sequence(
                self.client.register_model(one, sinks=sinks))
            async with self.service.step([(sequence, 6)]) as step:
                for layer in range(2):
                    got = await getattr(step, f"attend_{kind}")(layer, *call)
            with self.subTest(kind):
                np.testing.assert_allclose(got.o, want.o, atol=0.02)

    async def test_many_tasks_share_a_service(self):
        sequences = [await self.service.open_sequence(self.model) for _ in range(6)]
        outputs = await asyncio.gather(*(self.generate(sequence) for sequence in sequences))
        for output in outputs:
            np.testing.assert_allclose(output, self.local(), atol=0.02)

    async def test_the_loop_is_not_blocked(self):
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticker = asyncio.create_task(tick())
        await self.generate(await self.service.open_sequence(self.model))
        ticker.cancel()
        self.assertGreater(ticks, LAYERS)

    async def test_a_prefix_is_committed(self):
        sequence = await self.service.open_sequence(self.model)
        async with self.service.step([(sequence, ROWS)]) as step:
            for layer in range(LAYERS):
                await step.attend(layer, self.q, self.kv, Profile.ABSORBED)
            self.assertEqual(await step.end([4]), [4])
        async with self.service.step([(sequence, 2)]) as step:
            await step.abort()
        self.assertEqual(sequence.refresh().length, 4)

    async def test_an_error_aborts(self):
        sequence = await self.service.open_sequence(self.model)
        with self.assertRaises(mla_client.InvalidArgument):
            async with self.service.step([(sequence, ROWS)]) as step:
                await step.attend(LAYERS, self.q, self.kv, Profile.ABSORBED)
        self.assertFalse(sequence.refresh().in_step)

    async def test_a_task_cancelled_while_it_begins_aborts(self):
        sequence = await self.service.open_sequence(self.model)
        task = asyncio.create_task(self.generate(sequence))
        await asyncio.sleep(0)  # the step is on its way
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task
        self.assertFalse(sequence.refresh().in_step)

    async def test_a_cancelled_task_aborts(self):
        sequence = await self.service.open_sequence(self.model)
        entered = asyncio.Event()

        async def hang():
            async with self.service.step([(sequence, ROWS)]):
                entered.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(hang())
        await entered.wait()
        self.assertTrue(sequence.refresh().in_step)
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task
        self.assertFalse(sequence.refresh().in_step)


if __name__ == "__main__":
    unittest.main()
