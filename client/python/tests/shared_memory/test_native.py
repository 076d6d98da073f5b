"""Rings of the C library: the same steps as over Python's own, and calls that are chained."""

import ctypes
import os
import threading
import time
import unittest
from unittest import mock

import mla_client
import numpy as np
import server_binary
from mla_client import Profile, errors, native
from mla_client.gen import attention_pb2
from service_contract import GEOMETRY, LAYERS, SCALE
from shared_memory.native_ring import FAKE, WAIT_S, Gpu, RingCase


class NativeTest(RingCase):
    def test_a_step(self):
        client, model = self.connect()
        with model.open_sequence() as sequence:
            with client.step([(sequence, 3)]) as step:
                for layer in range(LAYERS):
                    o = step.attend(layer, self.q, self.kv, Profile.ABSORBED).o
            self.assertEqual(sequence.length, 3)
        np.testing.assert_allclose(o, self.want, atol=2e-2, rtol=2e-2)

    def test_more_calls_than_the_memory_holds(self):
        client, model = self.connect()
        with model.open_sequence() as sequence, client.step([(sequence, 3)]) as step:
            step.attend(0, self.q, self.kv, Profile.ABSORBED)
            futures = [step.attend_async(0, self.q, None, Profile.ABSORBED) for _ in range(600)]
            while not futures[-1].done():
                time.sleep(0.001)
            for future in futures:
                np.testing.assert_allclose(future.result().o, self.want, atol=2e-2, rtol=2e-2)
            step.abort()

    def test_a_refusal_has_the_servers_detail(self):
        client, model = self.connect()
        with model.open_sequence() as sequence, client.step([(sequence, 3)]) as step:
            with self.assertRaises(errors.InvalidArgument) as caught:
                step.attend(LAYERS, self.q, self.kv, Profile.ABSORBED)
            self.assertEqual(caught.exception.detail.field, "attend.layer")
            step.abort()

    def test_a_chain_has_the_outputs_of_awaited_calls(self):
        client, model = self.pinned()
        gpu = Gpu()
        with model.open_sequence() as sequence:
            buffers = self.filled(client, model)
            awaited = []
            with client.step([(sequence, 3)]) as step:
                for layer in range(LAYERS):
                    awaited.append(step.attend(layer, buffers.q, buffers.kv, Profile.ABSORBED,
                                               out=buffers).o.copy())
                step.end([0])
            for _ in range(3):
                with client.step([(sequence, 3)]) as step:
                    chain = step.chain(buffers, Profile.ABSORBED)
                    for layer in range(LAYERS):
                        buffers.o[...] = 0
                        chain.attend(layer, gpu.stream.value)
                        gpu.finish()
                        np.testing.assert_array_equal(buffers.o, awaited[layer])
                    step.end([0])
            buffers.release()

    def test_a_chain_of_projected_queries(self):
        """Its tensors have one head, and its calls name all heads of the model."""
        client, _ = self.pinned()
        rng, rows, layout = np.random.default_rng(4), 3, "interleaved"
        geometry = mla_client.Geometry(4, 24, 8, 16, 16, q_lora_rank=40, hidden_size=48)
        model = client.register_model(mla_client.ModelSpec(
            "native-projected", geometry, 1, SCALE, 4, rope_layout=layout))
        shapes = (4, 16, 24), (4, 24, 16), (4, 24, 40), (48, 4, 16)
        w_uk, w_uv, w_uq, w_o = (rng.standard_normal(shape) / 6 for shape in shapes)
        model.upload_weights(0, w_uk, w_uv)
        self.assertTrue(model.upload_projected(0, w_uq, w_o).complete)
        rotations = rng.uniform(-1, 1, (rows, 8)).astype(np.float32)
        gpu = Gpu()
        with model.open_sequence() as sequence:
            buffers = client.buffers(model, rows, Profile.PROJECTED)
            self.assertEqual((buffers.q.shape, buffers.heads), ((rows, 1, 40), 4))
            for tensor in (buffers.q, buffers.kv):
                tensor[...] = mla_client.bf16.to_bf16(rng.standard_normal(tensor.shape))
            with client.step([(sequence, rows)], rotations=rotations) as step:
                awaited = step.attend(0, buffers.q, buffers.kv, Profile.PROJECTED,
                                      out=buffers).o.copy()
                step.end([0])
            self.assertTrue(awaited.any())
            with client.step([(sequence, rows)], rotations=rotations) as step:
                buffers.o[...] = 0
                step.chain(buffers, Profile.PROJECTED).attend(0, gpu.stream.value)
                gpu.finish()
                step.end([0])
            np.testing.assert_array_equal(buffers.o[:, 0], awaited)
            buffers.release()

    def test_a_chain_that_fails_says_so_at_the_end(self):
        client, model = self.pinned()
        gpu = Gpu()
        with model.open_sequence() as sequence:
            buffers = self.filled(client, model)
            step = client.step([(sequence, 3)]).begin()
            chain = step.chain(buffers, Profile.ABSORBED)
            chain.attend(LAYERS, gpu.stream.value)  # there is none
            gpu.finish()
            with self.assertRaises(errors.InvalidArgument) as caught:
                step.end()
            self.assertEqual(caught.exception.detail.field, "attend.layer")
            step.abort()
            self.assertEqual(sequence.refresh().length, 0)

    def a_pass(self, client, model, sequence, buffers, gpu, epoch=None):
        """Sends a step whole, and waits for nothing. Returns its requests and the chain."""
        stream, step_id = client._own_stream(), next(self.steps)
        deadline = time.monotonic() + WAIT_S
        begin = stream.ask(deadline, begin_step=attention_pb2.BeginStep(
            step_id=step_id, model_id=model.spec.model_id, participants=1,
            sequences=[attention_pb2.StepSequence(
                sequence_id=sequence.id, epoch=sequence.epoch if epoch is None else epoch,
                start_position=0, rows=3)]))
        chain = stream.chain(step_id, buffers, Profile.ABSORBED, 0, WAIT_S)
        for layer in range(LAYERS):
            chain.attend(layer, gpu.stream.value)
        end = stream.ask(deadline, end_step=attention_pb2.EndStep(step_id=step_id,
                                                                  committed_rows=[0]))
        return begin, chain, end

    def test_begin_and_end_travel_among_the_calls(self):
        client, model = self.pinned()
        gpu, deadline = Gpu(), time.monotonic() + WAIT_S
        with model.open_sequence() as sequence:
            buffers = self.filled(client, model)
            passes = [self.a_pass(client, model, sequence, buffers, gpu) for _ in range(20)]
            gpu.finish()
            np.testing.assert_allclose(mla_client.from_bf16(buffers.o), self.want, atol=2e-2,
                                       rtol=2e-2)
            for begin, chain, end in passes:
                begin.wait(deadline)
                chain.collect()
                end.wait(deadline)

    def test_a_begin_that_is_refused_fails_its_pass_alone(self):
        client, model = self.pinned()
        gpu, deadline = Gpu(), time.monotonic() + WAIT_S
        with model.open_sequence() as sequence:
            buffers = self.filled(client, model)
            bad = self.a_pass(client, model, sequence, buffers, gpu, epoch=99)
            good = self.a_pass(client, model, sequence, buffers, gpu)
            gpu.finish()
            for wait in (lambda: bad[0].wait(deadline), bad[1].collect,
                         lambda: bad[2].wait(deadline)):
                with self.assertRaises(errors.MlaError):
                    wait()
            good[0].wait(deadline)
            good[1].collect()
            good[2].wait(deadline)

    def test_steps_begin_and_end_without_waiting(self):
        client, model = self.pinned()
        gpu = Gpu()
        with model.open_sequence() as sequence:
            buffers = self.filled(client, model)
            for turn in range(3):
                step = client.step([(sequence, 3)]).begin(ahead=True)
                self.assertIsNotNone(step._beginning)
                chain = step.chain(buffers, Profile.ABSORBED)
                for layer in range(LAYERS):
                    chain.attend(layer, gpu.stream.value)
                step.end_ahead([3])
                self.assertEqual(sequence.length, 3 * turn)  # as before
                step.finish()
                self.assertEqual((sequence.length, step.open), (3 * turn + 3, False))
            gpu.finish()

    def test_what_went_ahead_and_was_refused_raises_at_the_end(self):
        client, model = self.pinned()
        gpu = Gpu()
        with model.open_sequence() as sequence:
            buffers = self.filled(client, model)
            for ending in ("finish", "end", "collect", "abort"):
                with mock.patch.object(sequence, "epoch", 99):
                    step = client.step([(sequence, 3)]).begin(ahead=True)
                chain = step.chain(buffers, Profile.ABSORBED)
                for layer in range(LAYERS):
                    chain.attend(layer, gpu.stream.value)
                if ending == "finish":
                    step.end_ahead()
                with self.subTest(ending):
                    if ending == "abort":
                        step.abort()
                        continue
                    with self.assertRaises(errors.MlaError) as caught:
                        getattr(step, ending)()
                    self.assertEqual(caught.exception.detail.reason, "epoch_mismatch")
                self.assertEqual((sequence.length, step.open), (0, False))
            gpu.finish()
            with client.step([(sequence, 3)]) as step:
                step.attend(0, self.q, self.kv, Profile.ABSORBED)
                step.abort()

    def test_a_reply_that_has_come_is_taken_even_if_its_time_is_up(self):
        """An engine may be away for longer than calls may take, between an end and its reply. No
        thread of the library looks for replies where nothing is chained."""
        client, model = self.connect()
        with model.open_sequence() as sequence:
            step = client.step([(sequence, 3)]).begin()
            for layer in range(LAYERS):
                step.attend(layer, self.q, self.kv, Profile.ABSORBED)
            with mock.patch.object(client, "timeout_s", -1.0):
                step.end_ahead()
            begun = time.monotonic()
            while True:
                try:
                    step._ending()
                    break
                except errors.DeadlineExceeded:
                    self.assertLess(time.monotonic(), begun + WAIT_S)

    def test_a_chain_whose_copies_change(self):
        client, model = self.pinned()
        gpu = Gpu()
        with model.open_sequence() as sequence:
            buffers = self.filled(client, model)
            found = np.zeros((2, *buffers.o.shape), buffers.o.dtype)
            with client.step([(sequence, 3)]) as step:
                chain = step.chain(buffers, Profile.ABSORBED)
                chain.attend(0, gpu.stream.value)  # without any
                chain.clear()
                chain.copy_out(buffers.o.ctypes.data, buffers.o.nbytes)
                for layer in range(1, LAYERS):
                    chain.attend(layer, gpu.stream.value, (), found[layer % 2].ctypes.data)
                chain.collect()
                gpu.finish()
                for layer in range(max(1, LAYERS - 2), LAYERS):
                    want, _ = self.worker.expected(layer, self.q, self.kv, Profile.ABSORBED)
                    np.testing.assert_allclose(mla_client.from_bf16(found[layer % 2]), want,
                                               atol=2e-2, rtol=2e-2)
                chain.collect()  # nothing is left to wait for
                step.abort()

    def test_the_stream_copies(self):
        client, model = self.pinned()
        gpu = Gpu()
        with model.open_sequence() as sequence:
            buffers = self.filled(client, model)
            q, kv = buffers.q.copy(), buffers.kv.copy()
            o = np.zeros_like(buffers.o)
            with client.step([(sequence, 3)]) as step:
                chain = step.chain(buffers, Profile.ABSORBED)
                chain.copy_in(buffers.q.ctypes.data, q.nbytes)
                width = kv.shape[1]
                chain.copy_in(buffers.kv.ctypes.data, 2 * (width - 2), 3, 2 * width, 2 * width)
                chain.copy_in(buffers.kv.ctypes.data + 2 * (width - 2), 4, 3, 2 * width, 2 * width)
                chain.copy_out(buffers.o.ctypes.data, o.nbytes)
                for layer in range(LAYERS):
                    buffers.q[...], buffers.kv[...], o[...] = 0, 0, 0
                    kv_at = kv.ctypes.data
                    chain.attend(layer, gpu.stream.value,
                                 [q.ctypes.data, kv_at, kv_at + 2 * (width - 2)], o.ctypes.data)
                    gpu.finish()
                    np.testing.assert_array_equal(buffers.kv, kv)
                    np.testing.assert_allclose(mla_client.from_bf16(o), self.want, atol=2e-2,
                                               rtol=2e-2)
                step.abort()

    def test_a_refused_entry_sends_nothing(self):
        client, model = self.pinned()
        gpu = Gpu()
        with model.open_sequence() as sequence:
            buffers = self.filled(client, model)
            with client.step([(sequence, 3)]) as step:
                chain = step.chain(buffers, Profile.ABSORBED)
                for field in ("in_on_gpu", "reserved"):
                    setattr(chain._entry, field, 2)
                    with self.assertRaises(errors.InvalidArgument) as caught:
                        chain.attend(0, gpu.stream.value)
                    self.assertEqual(caught.exception.detail.field, f"entry.{field}")
                    setattr(chain._entry, field, 0)
                for layer in range(LAYERS):
                    chain.attend(layer, gpu.stream.value)
                gpu.finish()
                np.testing.assert_allclose(mla_client.from_bf16(buffers.o), self.want, atol=2e-2,
                                           rtol=2e-2)

    def test_without_a_gpu_nothing_is_chained(self):
        client, model = self.connect()
        with model.open_sequence() as sequence, client.step([(sequence, 3)]) as step:
            self.assertIsNone(step.chain(self.filled(client, model), Profile.ABSORBED))
            step.abort()

    def test_a_server_that_is_killed_lets_the_stream_go_on(self):
        """A thread of the library sees it: this one waits for the stream alone."""
        server = server_binary.start("--shm-device-wait-ms=60000")
        try:
            client = mla_client.Client.connect(server.target, transport="ring", pinned=True,
                                               device_library=str(FAKE), shared_bytes=1 << 20)
            model = client.register_model(
                mla_client.ModelSpec("killed", GEOMETRY, LAYERS, SCALE, 4))
            sequence = model.open_sequence()
            buffers = self.filled(client, model)
            step = client.step([(sequence, 3)]).begin()
            chain = step.chain(buffers, Profile.ABSORBED)
            server._process.send_signal(19)  # SIGSTOP: what is sent has no answer
            gpu = Gpu()
            chain.attend(0, gpu.stream.value)
            killer = threading.Timer(0.2, server.kill)
            killer.start()
            gpu.finish()
            killer.join()
            with self.assertRaises(errors.Unavailable):
                step.end()
            self.assertIsNotNone(client._stream.broken)
            client.close()
        finally:
            server.stop()

    def test_bad_input_is_refused_with_its_field(self):
        client, model = self.pinned()
        lib, ring = native.library(), client._own_stream().memory.ring
        entry = native.sized(native.Entry, flags=128, profile=1, q_dtype=1, o_dtype=1)
        copies = (native.Copy * 9)(*[native.Copy(1, 1, 2, 1, 2, 2)] * 9)
        entry.copies_in = copies

        def refused(**fields):
            for name, value in fields.items():
                setattr(entry, name, value)
            error, request = ctypes.c_void_p(), ctypes.c_void_p()
            code = lib.mla_ring_attend(ring, ctypes.byref(entry), 0, ctypes.byref(request),
                                       ctypes.byref(error))
            self.assertEqual(code, 3)
            return lib.error(error).detail.field
        self.assertEqual(refused(in_count=9), "entry.in")
        copies[0].from_pitch = 1  # rows of two bytes
        self.assertEqual(refused(in_count=1), "entry.in")
        self.assertEqual(refused(flags=0), "entry.in_count")
        self.assertEqual(refused(in_count=0, q_dtype=16), "entry.q_dtype")
        for options, field in (({"gpu": -2}, "options.gpu"), ({"connect_ms": -1},
                                                              "options.connect_ms"),
                               ({"gpu": -1, "device_bytes": 1}, "options.device_bytes")):
            error, opened = ctypes.c_void_p(), ctypes.c_void_p()
            code = lib.mla_ring_open(b"/nowhere", ctypes.byref(native.sized(native.Options,
                                                                            **options)),
                                     ctypes.byref(opened), ctypes.byref(error))
            self.assertEqual(code, 3)
            self.assertEqual(lib.error(error).detail.field, field)

    def test_a_chain_refuses_bad_input_with_its_field(self):
        client, model = self.pinned()
        lib, ring = native.library(), client._own_stream().memory.ring
        copies = (native.Copy * 9)(*[native.Copy(1, 1, 2, 1, 2, 2)] * 9)
        made = ctypes.c_void_p()

        def field_of(call, *arguments):
            error = ctypes.c_void_p()
            self.assertEqual(call(*arguments, ctypes.byref(error)), 3)
            return lib.error(error).detail.field

        def new(of=ring, **fields):
            entry = native.sized(native.Entry, profile=1, q_dtype=1, o_dtype=1, copies_in=copies,
                                 **fields)
            return field_of(lib.mla_chain_new, of, ctypes.byref(entry), ctypes.byref(made))
        self.assertEqual(new(flags=0), "entry.flags")
        self.assertEqual(new(flags=128, in_count=9), "entry.in")
        self.assertEqual(new(of=None, flags=128), "ring")
        entry = native.sized(native.Entry, flags=128, profile=1, q_dtype=1, o_dtype=1,
                             copies_in=copies, in_count=1)
        error = ctypes.c_void_p()
        lib.check(lib.mla_chain_new(ring, ctypes.byref(entry), ctypes.byref(made),
                                    ctypes.byref(error)), error)
        try:
            self.assertEqual(field_of(lib.mla_chain_attend, made, 1, 0, None, None, 0), "addresses")
            somewhere = (ctypes.c_void_p * 1)()
            self.assertEqual(field_of(lib.mla_chain_attend, made, 1, 0, None, somewhere, -1),
                             "room_ms")
            self.assertEqual(field_of(lib.mla_chain_attend, None, 1, 0, None, None, 0), "chain")
            self.assertEqual(field_of(lib.mla_chain_wait, made, -1), "wait_ms")
            lib.check(lib.mla_chain_wait(made, 0, ctypes.byref(error)), error)  # nothing was sent
            self.assertEqual(field_of(lib.mla_chain_begin, made, None, 0, 0), "message")
            for body in ({"end_step": {"step_id": 1}}, {"begin_step": {"participants": 2}},
                         {"begin_step": {"rotations": True}}):
                message = attention_pb2.AttendStreamRequest(**body).SerializeToString()
                self.assertIn(field_of(lib.mla_chain_begin, made, message, len(message), 0),
                              ("message", "message.begin_step"))
            self.assertEqual(field_of(lib.mla_chain_begin, made, b"?", 1, 0), "message")
            self.assertEqual(field_of(lib.mla_chain_begin, None, b"", 0, 0), "chain")
            self.assertEqual(field_of(lib.mla_chain_begin_next, made, 1, -1), "room_ms")
            for call in (lambda: lib.mla_chain_begin_next(made, 1, 0, ctypes.byref(error)),
                         lambda: lib.mla_chain_end(made, 0, ctypes.byref(error))):
                with self.assertRaises(errors.FailedPrecondition):
                    lib.check(call(), error)
        finally:
            lib.mla_chain_free(made)

    def test_what_the_environment_names_must_be_there(self):
        with mock.patch.dict(os.environ, {native.VARIABLE: "/nowhere.so"}):
            with self.assertRaises(errors.FailedPrecondition):
                native._load()
        with mock.patch.dict(os.environ, {native.VARIABLE: ""}):
            self.assertIsNone(native._load()[0])


if __name__ == "__main__":
    unittest.main()
