"""mla_client.pytorch: placement of tensors. The host plays a GPU, whose streams note what they are
given."""

import types
import unittest
from unittest import mock

import mla_client
import numpy as np
import torch
from mla_client import Buffers, DType, Profile, pytorch
from mla_client.shm.shared_memory import Place

INPUTS = ("client/python",)
ENVIRONMENT = "transformers"
GEOMETRY = mla_client.Geometry(2, 32, 8, 16, 12)


class GpuTensor(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True
    device = torch.device("cpu")


class Service(mla_client.LocalReference):
    """A service with GPU memory for `room` calls at the same time."""

    def __init__(self, room=1):
        super().__init__(exact=True)
        self.room, self.made, self.streams = room, [], []

    def buffers(self, model, rows, profile=Profile.EXPANDED, *, device="cpu", **options):
        self.made.append((device, rows))
        made = super().buffers(model, rows, profile, **options)
        if device == "cpu":
            return made
        if self.room is None:
            raise mla_client.Unavailable("no shared memory")
        if self.room == 0:
            raise mla_client.ResourceExhausted("no room")
        self.room -= 1
        place = Place(None, 0, 0, 0, 0, True)
        return Buffers(made.kv, made.q, made.o, None, made.dtype, place, self.returned)

    def returned(self):
        self.room += 1

    def _attend(self, step, args):
        if args.out.place is not None:
            self.streams.append(args.out.stream)
        return super()._attend(step, args)


class Stream:
    """A stream of the GPU."""

    def __init__(self, handle):
        self.cuda_stream, self.waited_for, self.synchronized = handle, [], 0

    def wait_stream(self, other):
        self.waited_for.append(other)

    def synchronize(self):
        self.synchronized += 1


class SenderTest(unittest.TestCase):
    def setUp(self):
        self.stream = Stream(7)
        torch.manual_seed(1)
        for patch in (mock.patch.object(torch, "from_dlpack", lambda array: pytorch.tensor_of(
                array).as_subclass(GpuTensor)),
                      mock.patch.object(torch.cuda, "current_stream", lambda device: self.stream),
                      mock.patch.object(pytorch.fast_path, "raw_stream",
                                        lambda index: self.stream.cuda_stream),
                      mock.patch("mla_client.service.step.device_memory.check_call")):
            patch.start()
            self.addCleanup(patch.stop)

    def start(self, service):
        self.service = service
        self.model = service.register_model(mla_client.ModelSpec("m", GEOMETRY, 2, 0.2))
        for layer in range(2):
            self.model.upload_weights(layer, np.ones((2, 16, 32)), np.ones((2, 32, 12)))
        self.sender = pytorch.Sender()

    def attend(self, rows, gpu=True, streams=(None, None)):
        """Outputs of both layers of a step, and the expected outputs."""
        with self.model.open_sequence() as sequence, self.service.step([(sequence, rows)]) as step:
            for layer, stream in enumerate(streams):
                self.stream = stream or self.stream
                q, kv = torch.randn(rows, 2, 24), torch.randn(rows, 40)
                given = q.as_subclass(GpuTensor) if gpu else q
                got = self.sender.attend(step, layer, given, kv)
                want = step.attend(layer, q.numpy(), None, dtype=DType.F32, o_dtype=DType.F32,
                                   out=self.service.buffers(self.model, rows, kv=False,
                                                            dtype=DType.F32, o_dtype=DType.F32)).o
                np.testing.assert_allclose(np.asarray(got), want, atol=1e-6)

    def test_tensors_of_a_gpu_stay_there(self):
        self.start(Service())
        self.attend(3)
        self.assertEqual([made for made in self.service.made if made[0] == "cuda"], [("cuda", 3)])
        self.assertEqual(self.service.streams, [7, 7])
        self.assertEqual(self.stream.synchronized, 0)

    def test_another_stream_waits(self):
        self.start(Service())
        first, second = self.stream, Stream(9)
        self.attend(2, streams=(first, second))
        self.assertEqual(self.service.streams, [7, 9])
        self.assertEqual((first.waited_for, second.waited_for), ([], [first]))

    def test_memory_is_given_back_when_it_is_not_in_use(self):
        self.start(Service())
        self.attend(2)
        self.attend(5)  # the first step's room is used again
        self.assertEqual((self.stream.synchronized, self.service.room), (1, 0))
        self.sender.release()
        self.sender.release()
        self.assertEqual((self.stream.synchronized, self.service.room), (2, 1))

    def test_without_memory_of_a_gpu_they_go_through_the_host(self):
        for room in (None, 0):
            self.start(Service(room))
            self.attend(2)
            self.assertEqual(self.service.made[:2], [("cuda", 2), ("cpu", 2)])
            self.assertEqual(self.service.streams, [])

    def test_tensors_of_the_host_are_not_sent_to_a_gpu(self):
        self.start(Service())
        self.attend(2, gpu=False)
        self.assertEqual(self.service.streams, [])
        self.attend(2)
        self.assertEqual(self.service.streams, [7, 7])


if __name__ == "__main__":
    unittest.main()
