"""Behaviour that every Service must have; run against LocalReference and against a real server."""

import contextlib
import itertools
import secrets
import threading

import mla_client
import numpy as np
from contract.projected_contract import ProjectedContract
from contract.sparse_contract import SparseContract
from contract.window_contract import WindowContract
from mla_client import DType, Geometry, ModelSpec, Profile, bf16, wire

GEOMETRY = Geometry(3, 32, 16, 16, 16)
LAYERS = 2
SCALE = 0.17
# bf16 inputs and cache, float32 accumulation: outputs of these sizes differ by rounding alone.
TOLERANCE = 2e-2


class Worker:
    """Random weights, queries and rows of one model, and the textbook answer to compare with."""

    def __init__(self, seed=1, geometry=GEOMETRY):
        self.geometry = geometry
        self.rng = np.random.default_rng(seed)
        shape = (LAYERS, geometry.num_heads)
        self.w_uk = self.values(*shape, geometry.nope_dim, geometry.kv_lora_rank) / 6
        self.w_uv = self.values(*shape, geometry.kv_lora_rank, geometry.v_dim) / 6

    def values(self, *shape):
        return mla_client.round_to_bf16(self.rng.standard_normal(shape))

    def queries(self, rows, profile):
        return self.values(rows, self.geometry.num_heads, self.geometry.q_dim(profile))

    def kv(self, rows):
        return self.values(rows, self.geometry.row_dim)

    def expected(self, layer, q, keys, profile):
        """Row by row, head by head; the last query row sees all keys."""
        lora, nope = self.geometry.kv_lora_rank, self.geometry.nope_dim
        o = np.zeros((*q.shape[:2], self.geometry.o_dim(profile)))
        lse = np.zeros(q.shape[:2])
        for row in range(len(q)):
            seen = keys[:len(keys) - len(q) + row + 1].astype(np.float64)
            for head in range(q.shape[1]):
                query = q[row, head].astype(np.float64)
                if profile == Profile.EXPANDED:
                    query = np.concatenate([query[:nope] @ self.w_uk[layer, head], query[nope:]])
                scores = seen @ query * SCALE
                weights = np.exp(scores - scores.max())
                latent = weights @ seen[:, :lora] / weights.sum()
                o[row, head] = (latent @ self.w_uv[layer, head]
                                if profile == Profile.EXPANDED else latent)
                lse[row, head] = scores.max() + np.log(weights.sum())
        return o, lse


class ServiceContract(ProjectedContract, SparseContract, WindowContract):
    """Mixin for a TestCase that provides make_service()."""

    def setUp(self):
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)
        self.service = self.stack.enter_context(self.make_service())
        self.worker = Worker()
        self.model = self.register()

    def register(self):
        spec = ModelSpec("m-" + secrets.token_hex(4), GEOMETRY, LAYERS, SCALE, 4)
        model = self.service.register_model(spec)
        for layer in range(LAYERS):
            status = model.upload_weights(layer, self.worker.w_uk[layer], self.worker.w_uv[layer])
            self.assertEqual(status.missing_layers, list(range(layer + 1, LAYERS)))
        self.assertTrue(status.complete)
        return model

    def close_to(self, got, want):
        np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=TOLERANCE)

    def add(self, sequence, kv, profile=Profile.EXPANDED, *, keep=None, check=True, seen=None):
        """Adds rows kv [layers, rows, row dim] in one step and checks the outputs."""
        rows = kv.shape[1]
        with self.service.step([(sequence, rows)]) as step:
            for layer in range(LAYERS):
                q = self.worker.queries(rows, profile)
                result = step.attend(layer, q, kv[layer], profile, want_lse=True)
                if check:
                    keys = kv[layer] if seen is None else np.concatenate([seen[layer], kv[layer]])
                    o, lse = self.worker.expected(layer, q, keys, profile)
                    self.close_to(result.o, o)
                    self.close_to(result.lse, lse)
            if keep is not None:
                step.end([keep])
        return kv if seen is None else np.concatenate([seen, kv], axis=1)

    def rows(self, count):
        return np.stack([self.worker.kv(count) for _ in range(LAYERS)])

    def test_prefill_then_decode_both_profiles(self):
        for profile in (Profile.EXPANDED, Profile.ABSORBED):
            with self.model.open_sequence() as sequence:
                seen = self.add(sequence, self.rows(11), profile)
                for _ in range(3):
                    seen = self.add(sequence, self.rows(1), profile, seen=seen)
                self.add(sequence, self.rows(9), profile, seen=seen)
                self.assertEqual(sequence.length, 23)
                self.assertEqual(sequence.refresh().length, 23)

    def test_tensors_of_8_bits(self):
        for profile, kv_row_dtype in itertools.product(
                (Profile.EXPANDED, Profile.ABSORBED), (None, DType.F8_E4M3)):
            with self.subTest(profile=profile, kv_row_dtype=kv_row_dtype), \
                    self.model.open_sequence() as sequence, \
                    self.service.step([(sequence, 4)]) as step:
                for layer in range(LAYERS):
                    # The values sent have 8 bits already, so sending does not round.
                    q = bf16.round_to_e4m3(self.worker.queries(4, profile),
                                           self.model.spec.geometry.q_parts(profile))
                    kv = bf16.round_to_e4m3(self.worker.kv(4), self.model.spec.kv_parts)
                    result = step.attend(layer, q, kv, profile, dtype=DType.F8_E4M3,
                                         kv_row_dtype=kv_row_dtype, o_dtype=DType.F32)
                    self.close_to(result.o, self.worker.expected(layer, q, kv, profile)[0])
        with self.model.open_sequence() as sequence, self.service.step([(sequence, 1)]) as step:
            q, kv = self.worker.queries(1, Profile.ABSORBED), self.worker.kv(1)
            for field, options in (("o_dtype", dict(o_dtype=DType.F8_E4M3)),
                                   ("kv_row_dtype", dict(kv_row_dtype=DType.F32))):
                with self.assertRaisesRegex(mla_client.InvalidArgument, field):
                    step.attend(0, q, kv, Profile.ABSORBED, **options)
            step.abort()
        with self.assertRaisesRegex(mla_client.InvalidArgument, "dtype"):
            self.service.buffers(self.model, 1, dtype=DType.F8_E4M3)

    def test_buffers(self):
        """Tensors written where they travel from, outputs read where they arrive."""
        dtypes = ((DType.BF16, DType.BF16), (DType.F32, DType.BF16), (DType.BF16, DType.F32))
        for profile, (dtype, o_dtype), want_lse in itertools.product(
                (Profile.EXPANDED, Profile.ABSORBED), dtypes, (False, True)):
            with self.subTest(profile=profile, dtype=dtype, o_dtype=o_dtype, want_lse=want_lse), \
                    self.model.open_sequence() as sequence, \
                    self.service.buffers(self.model, 5, profile, want_lse=want_lse, dtype=dtype,
                                         o_dtype=o_dtype) as buffers, \
                    self.service.step([(sequence, 5)]) as step:
                for layer in range(LAYERS):
                    q, kv = self.worker.queries(5, profile), self.worker.kv(5)
                    wire.encode_into(buffers.q, q)
                    wire.encode_into(buffers.kv, kv)
                    result = step.attend(layer, buffers.q, buffers.kv, profile, out=buffers)
                    self.assertIs(result.o, buffers.o)
                    self.assertIs(result.lse, buffers.lse)
                    got = np.empty(buffers.o.shape, np.float32)
                    wire.decode_into(got, buffers.o)
                    o, lse = self.worker.expected(layer, q, kv, profile)
                    self.close_to(got, o)
                    if want_lse:
                        self.close_to(result.lse, lse)

    def test_buffers_for_outputs_alone(self):
        with self.model.open_sequence() as sequence, self.service.step([(sequence, 4)]) as step, \
                self.service.buffers(self.model, 4, o_dtype=DType.F32, kv=False) as buffers:
            self.assertIsNone(buffers.kv)
            for layer in range(LAYERS):
                q, kv = self.worker.queries(4, Profile.EXPANDED), self.worker.kv(4)
                self.assertIs(step.attend(layer, q, kv, out=buffers).o, buffers.o)
                self.close_to(buffers.o, self.worker.expected(layer, q, kv, Profile.EXPANDED)[0])

    def test_buffers_of_another_shape(self):
        with self.model.open_sequence() as sequence, self.service.step([(sequence, 2)]) as step:
            q, kv = self.worker.queries(2, Profile.EXPANDED), self.worker.kv(2)
            for wrong in (self.service.buffers(self.model, 3),
                          self.service.buffers(self.model, 2, heads=1),
                          self.service.buffers(self.model, 2, Profile.ABSORBED),
                          self.service.buffers(self.model, 2, Profile.APPEND_ONLY)):
                with wrong, self.assertRaisesRegex(mla_client.InvalidArgument, "out.o"):
                    step.attend(0, q, kv, out=wrong)
            with self.assertRaises(mla_client.InvalidArgument):
                self.service.buffers(self.model, 0)
            step.abort()

    def test_append_only_then_attend(self):
        with self.model.open_sequence() as sequence:
            kv = self.rows(6)
            with self.service.step([(sequence, 6)]) as step:
                for layer in range(LAYERS):
                    result = step.attend(layer, None, kv[layer], Profile.APPEND_ONLY)
                    self.assertIsNone(result.o)
            self.add(sequence, self.rows(2), seen=kv)

    def test_several_sequences_in_one_step(self):
        with self.model.open_sequence() as one, self.model.open_sequence() as two:
            seen_one = self.add(one, self.rows(5))
            kv_one, kv_two = self.rows(1), self.rows(3)
            with self.service.step([(one, 1), (two, 3)]) as step:
                for layer in range(LAYERS):
                    q = self.worker.queries(4, Profile.EXPANDED)
                    o = step.attend(layer, q,
                                    np.concatenate([kv_one[layer], kv_two[layer]])).o
                    keys = np.concatenate([seen_one[layer], kv_one[layer]])
                    want, _ = self.worker.expected(layer, q[:1], keys, Profile.EXPANDED)
                    self.close_to(o[:1], want)
                    want, _ = self.worker.expected(layer, q[1:], kv_two[layer], Profile.EXPANDED)
                    self.close_to(o[1:], want)
            self.assertEqual((one.length, two.length), (6, 3))

    def test_row_ranges_and_head_slices(self):
        with self.model.open_sequence() as sequence:
            kv = self.rows(7)
            with self.service.step([(sequence, 7)]) as step:
                for layer in range(LAYERS):
                    q = self.worker.queries(7, Profile.ABSORBED)
                    want, _ = self.worker.expected(layer, q, kv[layer], Profile.ABSORBED)
                    for begin, end in ((0, 3), (3, 7)):
                        first = step.attend(layer, q[begin:end, :1], kv[layer, begin:end],
                                            Profile.ABSORBED, row_begin=begin)
                        rest = step.attend(layer, q[begin:end, 1:], None, Profile.ABSORBED,
                                           row_begin=begin, head_offset=1)
                        self.close_to(np.concatenate([first.o, rest.o], axis=1), want[begin:end])

    def test_draft_keeps_a_prefix(self):
        with self.model.open_sequence() as sequence:
            seen = self.add(sequence, self.rows(5))
            draft = self.rows(4)
            epoch = sequence.epoch
            self.add(sequence, draft, keep=2, seen=seen)
            self.assertEqual((sequence.length, sequence.epoch), (7, epoch))
            self.add(sequence, self.rows(1), seen=np.concatenate([seen, draft[:, :2]], axis=1))

    def test_keeping_nothing(self):
        with self.model.open_sequence() as sequence:
            seen = self.add(sequence, self.rows(3))
            self.add(sequence, self.rows(2), keep=0, seen=seen)
            self.assertEqual(sequence.length, 3)

    def test_fork_shares_and_diverges(self):
        with self.model.open_sequence() as parent:
            seen = self.add(parent, self.rows(10))
            for length in (10, 7, 0):
                with parent.fork(length) as child:
                    self.assertEqual(child.length, length)
                    shared = seen[:, :length] if length else None
                    self.add(child, self.rows(3), seen=shared)
            self.add(parent, self.rows(1), seen=seen)

    def test_truncate_is_fenced(self):
        with self.model.open_sequence() as sequence:
            seen = self.add(sequence, self.rows(9))
            epoch = sequence.epoch
            sequence.truncate(4)
            self.assertEqual(sequence.length, 4)
            self.assertGreater(sequence.epoch, epoch)
            current = sequence.epoch
            sequence.epoch = epoch
            with self.assertRaises(mla_client.FailedPrecondition) as caught:
                self.service.step([(sequence, 1)]).begin()
            self.assertEqual(caught.exception.detail.reason, "epoch_mismatch")
            # A repeat of the same truncation gives the same answer.
            sequence.truncate(4)
            self.assertEqual((sequence.length, sequence.epoch), (4, current))
            self.add(sequence, self.rows(2), seen=seen[:, :4])

    def test_abort_leaves_no_trace(self):
        with self.model.open_sequence() as sequence:
            seen = self.add(sequence, self.rows(5))
            with self.assertRaises(ZeroDivisionError):
                with self.service.step([(sequence, 2)]) as step:
                    step.attend(0, None, self.worker.kv(2), Profile.APPEND_ONLY)
                    raise ZeroDivisionError
            state = sequence.refresh()
            self.assertEqual((state.length, state.in_step), (5, False))
            self.add(sequence, self.rows(1), seen=seen)

    def test_misuse_is_named_before_anything_is_sent(self):
        with self.model.open_sequence() as sequence:
            step = self.service.step([(sequence, 1)])
            row = self.worker.kv(1)
            for call in (lambda: step.attend(0, None, row, Profile.APPEND_ONLY), step.end,
                         step.abort):
                with self.assertRaisesRegex(mla_client.FailedPrecondition, "has not begun"):
                    call()
            for name, call in (
                    (r"step.rows\[0\]", lambda: self.service.step([(sequence, -1)])),
                    ("step.lease_ms", lambda: self.service.step([(sequence, 1)], lease_ms=-1)),
                    ("step.step_id", lambda: self.service.step([(sequence, 1)], step_id=2**64)),
                    ("length", lambda: sequence.truncate(-1)),
                    ("length", lambda: sequence.fork(-1)),
                    ("lease_ms", lambda: self.model.open_sequence(lease_ms=2**32))):
                with self.assertRaisesRegex(mla_client.InvalidArgument, f"{name}: got"):
                    call()
            with step:
                for layer in range(LAYERS):  # anything that numpy can read is an array
                    step.attend(layer, None, row.tolist(), Profile.APPEND_ONLY)
                with self.assertRaisesRegex(mla_client.InvalidArgument, "got shape"):
                    step.attend(0, None, 3.0, Profile.APPEND_ONLY)
                with self.assertRaisesRegex(mla_client.InvalidArgument, "committed.*got -1"):
                    step.end([-1])
                self.assertIn("1 rows, open", repr(step))
            self.assertEqual(sequence.length, 1)
            self.assertIn(", 1 rows, epoch", repr(sequence))
            self.assertIn(repr(self.model.spec.model_id), repr(self.model))

    def test_what_is_committed_may_be_an_array(self):
        with self.model.open_sequence() as first, self.model.open_sequence() as second:
            for kept, lengths in ((np.array([2, 1]), [2, 1]), (np.array([0, 2], np.uint8), [2, 3])):
                with self.service.step([(first, 2), (second, 2)]) as step:
                    for layer in range(LAYERS):
                        step.attend(layer, None, self.worker.kv(4), Profile.APPEND_ONLY)
                    with self.assertRaises(TypeError):
                        step.end(np.array([0.5, 1]))
                    self.assertEqual(step.end(kept), lengths)

    def test_a_step_needs_every_layer(self):
        with self.model.open_sequence() as sequence:
            step = self.service.step([(sequence, 2)]).begin()
            step.attend(0, None, self.worker.kv(2), Profile.APPEND_ONLY)
            with self.assertRaises(mla_client.FailedPrecondition):
                step.end()
            step.attend(1, None, self.worker.kv(2), Profile.APPEND_ONLY)
            self.assertEqual(step.end(), [2])

    def test_repeats(self):
        with self.model.open_sequence() as sequence:
            with self.service.step([(sequence, 2)]) as step:
                kv = self.worker.kv(2)
                q = self.worker.queries(2, Profile.ABSORBED)
                first = step.attend(0, q, kv, Profile.ABSORBED)
                again = step.attend(0, q, kv, Profile.ABSORBED)
                self.close_to(again.o, first.o)
                with self.assertRaises(mla_client.AlreadyExists):
                    step.attend(0, q, kv + 1, Profile.ABSORBED)
                step.abort()

    def test_one_open_step_a_sequence(self):
        with self.model.open_sequence() as sequence:
            step = self.service.step([(sequence, 1)]).begin()
            for act in (lambda: self.service.step([(sequence, 1)]).begin(), sequence.fork,
                        lambda: sequence.truncate(0)):
                with self.assertRaises(mla_client.FailedPrecondition):
                    act()
            step.abort()
            sequence.fork().release()

    def test_release(self):
        sequence = self.model.open_sequence()
        step = self.service.step([(sequence, 1)]).begin()
        sequence.release()
        sequence.release()
        with self.assertRaises(mla_client.NotFound):
            sequence.refresh()
        with self.assertRaises(mla_client.MlaError):
            step.end()

    def test_a_sequence_may_be_handed_over(self):
        sequence = self.model.open_sequence()
        seen = self.add(sequence, self.rows(3))
        adopted = self.model.adopt_sequence(sequence.hand_over())
        self.assertEqual((adopted.length, adopted.epoch), (3, sequence.epoch))
        sequence.release()  # has no effect any more
        self.add(adopted, self.rows(2), seen=seen)
        adopted.release()
        with self.assertRaises(mla_client.NotFound):
            self.model.adopt_sequence(adopted.id)

    def test_open_is_idempotent(self):
        name = secrets.token_hex(8)
        with self.model.open_sequence(request_id=name) as one:
            self.assertEqual(self.model.open_sequence(request_id=name).id, one.id)
            with self.model.open_sequence() as other:
                self.assertNotEqual(other.id, one.id)

    def test_models(self):
        spec = self.model.spec
        self.assertEqual(spec.page_size, 4)
        self.assertEqual(self.service.register_model(spec).spec, spec)
        with self.assertRaises(mla_client.AlreadyExists):
            self.service.register_model(ModelSpec(spec.model_id, GEOMETRY, LAYERS + 1, SCALE, 4))
        with self.model.open_sequence():
            with self.assertRaises(mla_client.FailedPrecondition):
                self.model.unregister()
        self.model.unregister()
        with self.assertRaises(mla_client.NotFound):
            self.model.open_sequence()

    def test_expanded_needs_weights(self):
        model = self.service.register_model(
            ModelSpec("w-" + secrets.token_hex(4), GEOMETRY, LAYERS, SCALE))
        model.upload_weights(0, self.worker.w_uk[0], self.worker.w_uv[0])
        with model.open_sequence() as sequence:
            with self.service.step([(sequence, 1)]) as step:
                with self.assertRaisesRegex(mla_client.FailedPrecondition, "1"):
                    step.attend(0, self.worker.queries(1, Profile.EXPANDED), self.worker.kv(1))
                step.abort()

    def test_weights_by_head_range(self):
        model = self.service.register_model(
            ModelSpec("h-" + secrets.token_hex(4), GEOMETRY, LAYERS, SCALE))
        for layer in range(LAYERS):
            for first, last in ((1, 3), (0, 1)):
                status = model.upload_weights(layer, self.worker.w_uk[layer, first:last],
                                              self.worker.w_uv[layer, first:last], first)
        self.assertTrue(status.complete)
        # Equal weights may be sent again, others may not.
        again = self.worker.w_uk[0, :1], self.worker.w_uv[0, :1]
        self.assertTrue(model.upload_weights(0, *again).complete)
        with self.assertRaises(mla_client.AlreadyExists):
            model.upload_weights(0, again[0] + 1, again[1])
        self.model = model
        with model.open_sequence() as sequence:
            self.add(sequence, self.rows(3))

    def test_shapes_are_checked_before_sending(self):
        with self.model.open_sequence() as sequence:
            with self.service.step([(sequence, 2)]) as step:
                good = self.worker.queries(2, Profile.EXPANDED)
                for q, kv, profile in ((good[:, :, :-1], None, Profile.EXPANDED),
                                       (good, self.worker.kv(1), Profile.EXPANDED),
                                       (good, self.worker.kv(2)[:, 1:], Profile.EXPANDED),
                                       (good[0], None, Profile.EXPANDED),
                                       (None, None, Profile.APPEND_ONLY),
                                       (good, self.worker.kv(2), Profile.APPEND_ONLY),
                                       (None, self.worker.kv(2), Profile.EXPANDED)):
                    with self.assertRaises(mla_client.InvalidArgument):
                        step.attend(0, q, kv, profile)
                step.abort()

    def test_several_threads(self):
        """Sequences of several threads do not disturb each other."""
        faults = []

        def work(seed):
            try:
                worker = Worker(seed)
                with self.model.open_sequence() as sequence:
                    kv = np.stack([worker.kv(20) for _ in range(LAYERS)])
                    with self.service.step([(sequence, 20)]) as step:
                        for layer in range(LAYERS):
                            q = worker.queries(20, Profile.ABSORBED)
                            o = step.attend(layer, q, kv[layer], Profile.ABSORBED).o
                            want, _ = worker.expected(layer, q, kv[layer], Profile.ABSORBED)
                            self.close_to(o, want)
            except BaseException as error:  # reported by the thread that joins
                faults.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(faults, [])
