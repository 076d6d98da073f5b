"""Framing and splitting of Attend messages."""

import dataclasses
import itertools
import unittest

import numpy as np
from mla_client import Geometry, Profile, Timings, to_bf16, wire
from mla_client.gen import attention_pb2
from mla_client.types import AttendArgs, DType

GEOMETRY = Geometry(16, 512, 64, 128, 128, q_lora_rank=1536, hidden_size=2048)


def make_args(rows, heads, profile=Profile.EXPANDED, *, kv=True, lse=False, dtype=DType.BF16,
              o_dtype=DType.BF16, geometry=GEOMETRY):
    q = None
    if profile != Profile.APPEND_ONLY:
        q = np.zeros((rows, heads, geometry.q_dim(profile)), np.float32)
    rows_kv = np.zeros((rows, geometry.row_dim), np.float32) if kv else None
    args = AttendArgs(0, profile, 0, rows, 0, heads if q is not None else 0, q, rows_kv, lse,
                      dtype, o_dtype, 1.0)
    if dtype != DType.F8_E4M3:
        return args
    parts = (geometry.kv_lora_rank, geometry.rope_dim)
    return args._replace(dtype=DType.BF16, q_parts=geometry.q_parts(profile) if heads else (),
                         kv_parts=parts if kv else ())


class FrameTest(unittest.TestCase):
    def test_frame_is_what_protobuf_reads_and_writes(self):
        for size in (1, 127, 128, 300, 70000):
            message = attention_pb2.AttendStreamRequest(
                tag=7, attend=attention_pb2.Attend(step_id=3, layer=1))
            payload = np.arange(size, dtype=np.uint32).astype(np.uint8)
            framed = wire.frame(message.SerializeToString(), [payload[:size // 2],
                                                              payload[size // 2:]])
            message.payload = payload.tobytes()
            self.assertEqual(framed, message.SerializeToString())
            self.assertEqual(attention_pb2.AttendStreamRequest.FromString(framed), message)

    def test_no_payload(self):
        self.assertEqual(wire.frame(b"abc", []), b"abc")

    def test_encode(self):
        values = np.array([[1.0, 2.5], [3.0, -4.0]], np.float32)
        self.assertEqual(wire.encode(values.T, DType.F32).tobytes(), values.T.tobytes())
        self.assertEqual(wire.encode(values, DType.BF16).tobytes(), to_bf16(values).tobytes())
        self.assertEqual(wire.encode(to_bf16(values), DType.BF16).tobytes(),
                         to_bf16(values).tobytes())
        np.testing.assert_array_equal(wire.encode(to_bf16(values), DType.F32), values)


class ChunkTest(unittest.TestCase):
    def check(self, args, message_bytes, geometry=GEOMETRY):
        """Every row and head exactly once, in order, and no message above the bound."""
        chunks = list(wire.chunks(args, geometry, message_bytes))
        seen, kv_rows = [], []
        for chunk in chunks:
            rows = range(chunk.row_begin, chunk.row_begin + chunk.rows)
            heads = range(chunk.head_begin, chunk.head_begin + chunk.heads)
            seen += itertools.product(rows, heads)
            kv_rows += rows if chunk.has_kv else []
            request = wire.request_parts(args, chunk)
            self.assertLessEqual(sum(part.nbytes for part in request), message_bytes)
            reply = chunk.rows * chunk.heads * (
                geometry.o_dim(args.profile) * args.o_dtype.size + 4 * args.want_lse)
            self.assertLessEqual(reply, message_bytes)
        self.assertEqual(sorted(seen),
                         list(itertools.product(range(args.rows), range(args.num_heads))))
        self.assertEqual(kv_rows, list(range(args.rows)) if args.kv is not None else [])
        self.assertEqual([chunk.row_begin for chunk in chunks],
                         sorted(chunk.row_begin for chunk in chunks))
        return chunks

    def test_cuts_cover_and_fit(self):
        for profile, rows, kv, lse, dtype, bound in itertools.product(
                Profile, (1, 2, 17, 100), (True, False), (True, False), DType,
                (16384, 65536, 262144, 4 << 20)):
            if profile == Profile.APPEND_ONLY and (lse or not kv):
                continue
            if profile == Profile.PROJECTED and (lse or dtype == DType.F8_E4M3):
                continue
            most_heads = 1 if profile == Profile.PROJECTED else 16
            with self.subTest(profile=profile, rows=rows, kv=kv, lse=lse, bound=bound):
                o_dtype = DType.BF16 if dtype == DType.F8_E4M3 else dtype
                args = make_args(rows, most_heads, profile, kv=kv, lse=lse, dtype=dtype,
                                 o_dtype=o_dtype)
                for chunk in self.check(args, bound):
                    heads = chunk.heads or most_heads
                    sizes = wire.sizes(GEOMETRY, profile, chunk.rows, heads,
                                       GEOMETRY.row_dim if chunk.has_kv else 0, lse, args.dtype,
                                       o_dtype, 0, args.q_parts, args.kv_parts)
                    self.assertEqual(sum(part.nbytes for part in wire.request_parts(args, chunk)),
                                     sizes.kv + sizes.q)

    def test_small_work_is_one_message(self):
        self.assertEqual(len(self.check(make_args(8, 16), 4 << 20)), 1)

    def test_wide_rows_are_cut_by_heads(self):
        geometry = dataclasses.replace(GEOMETRY, num_heads=128)
        chunks = self.check(make_args(2, 128, geometry=geometry), 16384, geometry)
        self.assertGreater(len(chunks), 2)

    def test_hopeless_bound(self):
        for bound in (4096, 5000):
            with self.assertRaisesRegex(ValueError, "message_bytes"):
                list(wire.chunks(make_args(1, 16), GEOMETRY, bound))


class AssembleTest(unittest.TestCase):
    def test_replies_are_put_in_their_places(self):
        args = make_args(5, 16, lse=True, o_dtype=DType.F32)
        rng = np.random.default_rng(3)
        o = rng.standard_normal((5, 16, 128)).astype(np.float32)
        lse = rng.standard_normal((5, 16)).astype(np.float32)
        chunks = list(wire.chunks(args, GEOMETRY, 14000))
        self.assertGreater(len(chunks), 3)
        assembler = wire.ResultAssembler(args, GEOMETRY)
        for chunk in chunks:
            rows = slice(chunk.row_begin, chunk.row_begin + chunk.rows)
            heads = slice(chunk.head_begin, chunk.head_begin + chunk.heads)
            assembler.add(chunk, o[rows, heads].tobytes() + lse[rows, heads].tobytes(), Timings(1))
        result = assembler.result()
        np.testing.assert_array_equal(result.o, o)
        np.testing.assert_array_equal(result.lse, lse)
        self.assertEqual(len(result.timings), len(chunks))

    def test_wrong_reply_sizes(self):
        for lse, size in ((False, 10), (False, 4098), (True, 4096 + 60), (True, 4096)):
            args = make_args(1, 16, lse=lse)
            assembler = wire.ResultAssembler(args, GEOMETRY)
            chunk = next(wire.chunks(args, GEOMETRY, 4 << 20))
            with self.assertRaises(ValueError):
                assembler.add(chunk, bytes(size), Timings())

    def test_network_time_is_what_the_server_did_not_use(self):
        self.assertEqual(Timings(100, 10, 5, 50, 5).network_us, 30)
        self.assertEqual(Timings(10, 10, 5, 50, 5).network_us, 0)


if __name__ == "__main__":
    unittest.main()
