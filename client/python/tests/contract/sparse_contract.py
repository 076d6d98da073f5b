"""Sparse attention as every Service must compute it; a part of service_contract."""

import secrets

import mla_client
import numpy as np
from mla_client import DType, ModelSpec, Profile, bf16


class SparseContract:
    """Tests for a class with `service`, `worker`, `model` and `close_to`, as ServiceContract is."""

    @property
    def layers(self):
        return self.model.spec.layers

    def sparse_spec(self, **fields):
        spec = self.model.spec
        return ModelSpec("s-" + secrets.token_hex(4), spec.geometry, spec.layers,
                         spec.softmax_scale, 4, **{"attention": "sparse_v32", "top_k": 6, **fields})

    def register_sparse(self):
        spec = self.sparse_spec()
        model = self.service.register_model(spec)
        self.assertEqual((model.spec.attention, model.spec.top_k), ("sparse_v32", 6))
        for layer in range(self.layers):
            model.upload_weights(layer, self.worker.w_uk[layer], self.worker.w_uv[layer])
        return model

    def test_rows_attend_to_their_index_lists(self):
        for profile in (Profile.ABSORBED, Profile.EXPANDED):
            with self.register_sparse().open_sequence() as sequence:
                stored = [np.zeros((0, self.worker.geometry.row_dim), np.float32)] * self.layers
                for lists in ([[0], [1, 0], [], [-1, 3, 0, 3], [2, 4]],
                              np.array([[5, -1, 0], [-1, 6, 2], [-1, -1, -1]])):
                    with self.service.step([(sequence, len(lists))]) as step:
                        for layer in range(self.layers):
                            q = self.worker.queries(len(lists), profile)
                            kv = self.worker.kv(len(lists))
                            keys = stored[layer] = np.concatenate([stored[layer], kv])
                            got = step.attend_sparse(layer, q, lists, kv, profile, want_lse=True,
                                                     o_dtype=DType.F32)
                            self.check_lists(got, layer, q, keys, lists, profile)

    def check_lists(self, got, layer, q, keys, lists, profile):
        for row, entries in enumerate(lists):
            named = list(dict.fromkeys(position for position in entries if position >= 0))
            if not named:
                np.testing.assert_array_equal(got.o[row], 0)
                np.testing.assert_array_equal(got.lse[row], -np.inf)
                continue
            o, lse = self.worker.expected(layer, q[row:row + 1], keys[named], profile)
            self.close_to(got.o[row], o[0])
            self.close_to(got.lse[row], lse[0])

    def register_indexed(self):
        spec = self.sparse_spec(index_heads=3, index_dim=8)
        model = self.service.register_model(spec)
        self.assertEqual((model.spec.index_heads, model.spec.index_dim), (3, 8))
        for layer in range(self.layers):
            model.upload_weights(layer, self.worker.w_uk[layer], self.worker.w_uv[layer])
        return model

    def indexed_step(self, sequence, stored, profile, rows, **options):
        """A step of `rows` rows whose lists and outputs are checked; `stored` has, for each layer,
        the sequence's rows with their index keys."""
        rng, spec = self.worker.rng, sequence.model.spec
        row_dim, first = spec.geometry.row_dim, sequence.length
        with self.service.step([(sequence, rows)]) as step:
            for layer in range(self.layers):
                q = self.worker.queries(rows, profile)
                # Sizes differ widely, so that the scale of each row matters.
                sent = np.concatenate([self.worker.kv(rows), mla_client.round_to_bf16(
                    rng.standard_normal((rows, 8)) * 2.0**rng.integers(-3, 4, (rows, 1)))], 1)
                kept = np.concatenate([sent[:, :row_dim],
                                       bf16.round_rows_to_e4m3(sent[:, row_dim:])], axis=1)
                stored[layer] = np.concatenate([stored[layer], kept])
                queries = mla_client.round_to_bf16(rng.standard_normal((rows, 3, 8)))
                weights = rng.standard_normal((rows, 3)).astype(np.float32)
                got = step.attend_indexed(layer, q, queries, weights, sent, profile,
                                          want_lse=True, o_dtype=DType.F32, want_lists=True,
                                          **options)
                keys = stored[layer][:, row_dim:].astype(np.float64)
                best = []
                for row in range(rows):
                    logits = weights[row] @ np.maximum(queries[row] @ keys[:first + row + 1].T, 0)
                    best.append(np.sort(np.argsort(-logits, kind="stable")[:spec.top_k]))
                self.assertEqual([list(entries[entries >= 0]) for entries in got.lists],
                                 [list(entries) for entries in best])
                self.assertEqual(got.lists.shape, (rows, spec.top_k))
                self.check_lists(got, layer, q, stored[layer][:, :row_dim], best, profile)

    def test_the_indexer_of_the_service_chooses(self):
        empty = np.zeros((0, self.worker.geometry.row_dim + 8), np.float32)
        for profile in (Profile.ABSORBED, Profile.EXPANDED):
            with self.register_indexed().open_sequence() as sequence:
                stored = [empty] * self.layers
                for rows in (5, 1, 9):
                    self.indexed_step(sequence, stored, profile, rows)
                # Off the page: the fork continues separately, and the parent loses rows of both
                # kinds.
                with sequence.fork(10) as fork:
                    shared = [rows[:10] for rows in stored]
                    self.indexed_step(fork, shared, profile, 3)
                    sequence.truncate(9)
                    stored = [rows[:9] for rows in stored]
                    self.indexed_step(sequence, stored, profile, 4)
                    self.indexed_step(fork, shared, profile, 2)

    def test_what_the_indexer_is_refused(self):
        q, queries = self.worker.queries(1, Profile.ABSORBED), np.zeros((1, 3, 8))
        weights, sent = np.zeros((1, 3)), np.zeros((1, self.worker.geometry.row_dim + 8))
        with self.register_indexed().open_sequence() as sequence:
            with self.service.step([(sequence, 1)]) as step:
                for bad in ((queries[:, 1:], weights), (queries, weights[:, 1:])):
                    with self.assertRaises(mla_client.InvalidArgument):
                        step.attend_indexed(0, q, *bad, sent, Profile.ABSORBED)
                with self.assertRaises(mla_client.InvalidArgument):  # without the index key
                    step.attend_indexed(0, q, queries, weights, sent[:, :-1], Profile.ABSORBED)
                step.attend(0, q, sent, Profile.ABSORBED)
                sent[0, -1] += 1  # a repeat with another index key
                with self.assertRaises(mla_client.AlreadyExists):
                    step.attend(0, q, sent, Profile.ABSORBED)
                step.abort()
        with self.register_sparse().open_sequence() as sequence:
            with self.service.step([(sequence, 1)]) as step:
                with self.assertRaisesRegex(mla_client.InvalidArgument, "index_heads"):
                    step.attend_indexed(0, q, queries, weights, sent[:, :-8], Profile.ABSORBED)
                step.abort()
        for heads, dim, attention in ((5, 0, "sparse_v32"), (0, 24, "sparse_v32"), (5, 24, ""),
                                      (129, 24, "sparse_v32")):
            if heads > 128 and isinstance(self.service, mla_client.LocalReference):
                continue  # it has no limits
            with self.assertRaises(mla_client.InvalidArgument):
                self.service.register_model(self.sparse_spec(
                    attention=attention, top_k=6 if attention else 0, index_heads=heads,
                    index_dim=dim))

    def test_positions_that_a_row_does_not_see_are_refused(self):
        with self.register_sparse().open_sequence() as sequence:
            with self.service.step([(sequence, 2)]) as step:
                q, kv = self.worker.queries(2, Profile.ABSORBED), self.worker.kv(2)
                for lists in ([[0], [0, 2]], [[0], [1, -2]], [[1], [0]]):
                    with self.assertRaisesRegex(mla_client.InvalidArgument, "row [01], slot [01]"):
                        step.attend_sparse(0, q, lists, kv, Profile.ABSORBED)
                for lists in ([[0]], [[0], range(7)], [[0], [0.5]], [[0], [[0]]], [[0], [1 << 40]]):
                    with self.assertRaisesRegex(mla_client.InvalidArgument, "attend.lists"):
                        step.attend_sparse(0, q, lists, kv, Profile.ABSORBED)
                self.assertTrue(step.attend_sparse_async(0, q, [[0], [1]], kv,
                                                         Profile.ABSORBED).result().o.any())
                step.abort()
        with self.model.open_sequence() as sequence, self.service.step([(sequence, 1)]) as step:
            with self.assertRaisesRegex(mla_client.InvalidArgument, "dense"):
                step.attend_sparse(0, self.worker.queries(1, Profile.ABSORBED), [[0]],
                                   self.worker.kv(1), Profile.ABSORBED)
            step.abort()
