"""mla_client.pytorch.fast_path: which further calls go the fast path, and what they send."""

import unittest
from unittest import mock

import numpy as np
import torch
from mla_client import Buffers, DType, Geometry, pytorch
from mla_client.pytorch import fast_path
from mla_client.service import Service

INPUTS = ("client/python",)
ENVIRONMENT = "transformers"
ROWS, HEADS, DIM, LORA, ROPE, V = 3, 2, 8, 16, 4, 8


class Chain:
    """Notes its calls, and the copies that it was told of."""

    def __init__(self):
        self.calls, self.layouts, self.error = [], 0, None

    def clear(self, from_gpu=False):
        self.layouts += 1

    def copy_in(self, *arguments):
        pass

    copy_out = copy_in

    def attend(self, layer, stream, sources=(), to=0):
        if self.error is not None:
            raise self.error
        self.calls.append((layer, stream, list(sources), to))


class Step:
    """A step whose calls can be chained."""

    def __init__(self, service, handle="stream"):
        self.service, self._handle = service, handle
        self.model = mock.Mock()
        self.model.spec.geometry = Geometry(HEADS, LORA, ROPE, DIM - ROPE, V)
        self.made = []

    def chain(self, buffers, profile, head_offset=0):
        self.made.append(Chain())
        return self.made[-1]


def service():
    """A service without memory of a GPU."""
    made = mock.Mock(spec=Service)

    def buffers(model, rows, profile, device="cpu", kv=True, **options):
        if device != "cpu":
            raise pytorch.errors.Unavailable("none")
        return Buffers(np.zeros((rows, LORA + ROPE), np.float32) if kv else None,
                       np.zeros((rows, HEADS, DIM), np.float32),
                       np.zeros((rows, HEADS, V), np.float32), None, DType.F32)
    made.buffers = buffers
    return made


def tensors(rows=ROWS):
    """q, the two parts of kv, output."""
    return (torch.zeros(rows, HEADS, DIM), (torch.zeros(rows, LORA), torch.zeros(rows, 1, ROPE)),
            torch.zeros(rows, HEADS * V))


def addresses(q, kv, output):
    """As a chain gets them."""
    return [q.data_ptr(), *[part.data_ptr() for part in kv]], output.data_ptr()


class LayoutTest(unittest.TestCase):
    def test_all_that_copies_depend_on_counts(self):
        like = torch.zeros(4, 6), torch.zeros(3, 5, dtype=torch.bfloat16)
        others = {
            "shape": (torch.zeros(5, 6), like[1]), "rank": (torch.zeros(1, 4, 6), like[1]),
            "dtype": (torch.zeros(4, 6, dtype=torch.float16), like[1]),
            "strides": (torch.zeros(6, 4).T, like[1]),
            "pitch": (torch.zeros(4, 7)[:, :6], like[1]),
            "the last one": (like[0], torch.zeros(3, 5))}
        for make in (fast_path.layout_check, fast_path.plain_check):
            with self.subTest(check=make.__name__):
                check = make(*like)
                self.assertTrue(check(*like))
                self.assertTrue(check(torch.ones(8, 6)[4:], torch.ones_like(like[1])))
                for name, given in others.items():
                    self.assertFalse(check(*given), name)

    def test_a_torch_without_the_inner_function_is_looked_at_from_outside(self):
        with mock.patch.object(torch._C._dynamo.guards, "TensorGuards", side_effect=TypeError):
            check = fast_path.layout_check(torch.zeros(2))
        self.assertTrue(check(torch.ones(2)))
        self.assertFalse(check(torch.ones(3)))


class FastPathTest(unittest.TestCase):
    def setUp(self):
        self.stream = 7
        for patch in (mock.patch.object(fast_path, "raw_stream", lambda device: self.stream),
                      mock.patch.object(fast_path, "is_on_gpu", lambda tensor: True),
                      mock.patch.object(torch.cuda, "current_stream", mock.Mock())):
            patch.start()
            self.addCleanup(patch.stop)
        self.service = service()
        self.step = Step(self.service)
        self.sender = pytorch.Sender()

    def attend(self, layer, given, step=None):
        self.assertTrue(self.sender.attend_chained(step or self.step, layer, *given))

    def test_later_layers_send_their_own_addresses(self):
        for layer in range(3):
            given = tensors()
            self.attend(layer, given)
            sources, to = addresses(*given)
            self.assertEqual(self.step.made[0].calls[layer], (layer, 7, sources, to))
        self.assertEqual((len(self.step.made), self.step.made[0].layouts), (1, 1))

    def test_what_is_laid_out_in_another_way_is_looked_at_again(self):
        q, kv, output = tensors()
        self.attend(0, (q, kv, output))
        whole = torch.zeros(ROWS, LORA + ROPE)
        halves = whole[:, :LORA], whole[:, LORA:]
        self.attend(1, (q, halves, output))
        self.attend(2, (q, whole, output))
        self.attend(3, (q, whole, output))
        chain = self.step.made[0]
        self.assertEqual(chain.layouts, 3)
        self.assertEqual([len(call[2]) for call in chain.calls], [3, 3, 2, 2])

    def test_the_stride_of_a_single_row_says_nothing(self):
        q, _, output = tensors(rows=1)
        kv = torch.zeros(LORA, 1).T, torch.zeros(1, 1, ROPE)
        self.assertEqual(kv[0].stride(), (1, 1))
        with mock.patch.object(Chain, "copy_in") as copy_in:
            self.attend(0, (q, kv, output))
        of_rows = [call.args for call in copy_in.call_args_list if len(call.args) > 2]
        self.assertEqual(len(of_rows), 2)
        for _, width, rows, to_pitch, from_pitch in of_rows:
            self.assertEqual(rows, 1)
            self.assertGreaterEqual(to_pitch, width)
            self.assertGreaterEqual(from_pitch or width, width)  # 0: as wide as the row

    def test_what_the_library_does_not_copy_never_goes_the_short_way(self):
        q, kv, output = tensors()
        for layer in range(2):
            self.attend(layer, (q.half(), kv, output))
            self.assertIsNone(self.sender.fast_path)
        # The rows and the output alone are the library's.
        self.assertEqual([len(call[2]) for call in self.step.made[0].calls], [2, 2])

    def test_another_stream_and_another_step_begin_anew(self):
        given = tensors()
        self.attend(0, given)
        self.stream = 9
        self.attend(1, given)
        self.assertEqual([call[1] for call in self.step.made[0].calls], [7, 9])
        self.assertEqual(self.step.made[0].layouts, 2)
        later = Step(self.service)
        self.attend(0, given, later)
        self.assertEqual((len(self.step.made[0].calls), len(later.made[0].calls)), (2, 1))

    def test_other_ranks_send_no_rows(self):
        self.sender = pytorch.Sender(rank=1, ranks=2)
        for layer in range(2):
            given = tensors()
            self.attend(layer, given)
            self.assertEqual(self.step.made[0].calls[layer][2], [given[0].data_ptr()])

    def test_a_failure_ends_the_short_way(self):
        self.attend(0, tensors())
        self.step.made[0].error = pytorch.errors.Unavailable("it is gone")
        with self.assertRaises(pytorch.errors.Unavailable):
            self.attend(1, tensors())
        self.sender.forget()
        self.assertIsNone(self.sender.fast_path)
        self.attend(2, tensors())
        self.assertEqual(len(self.step.made), 2)


if __name__ == "__main__":
    unittest.main()
