"""A GPU for vLLM's CPU platform: the streams of a fake runtime, which wait and copy as a GPU's do.

Tensors are the host's, and so is the model's work, which does not wait for a stream. So after each
layer the host waits for the stream; the adapter's calls, their replies and the copies are those of
a GPU whose tensors go through the host's memory.
"""

import ctypes
import pathlib
import types

import torch
from mla_client import pytorch

LIBRARY = pathlib.Path(__file__).resolve().parents[3] / ".bazel/bin/tests/fake_hip/libfake_hip.so"


class FakeGpu:
    """The current device and stream of PyTorch in this process, once it is made."""

    def __init__(self, library=LIBRARY):
        self.options = {"pinned": True, "device": 0, "device_library": str(library)}
        self._library = ctypes.CDLL(str(library))
        self._stream = ctypes.c_void_p()
        if self._library.hipStreamCreateWithFlags(ctypes.byref(self._stream), 1):
            raise OSError(f"{library}: no stream")
        current = types.SimpleNamespace(cuda_stream=self._stream.value, synchronize=self.finish,
                                        wait_stream=lambda other: None)
        pytorch.fast_path.raw_stream = lambda device: current.cuda_stream
        pytorch.fast_path.is_on_gpu = lambda tensor: True
        torch.cuda.current_stream = lambda device=None: current

    def finish(self):
        """Waits until the stream has done what it was given."""
        self._library.hipStreamSynchronize(self._stream)

    def install(self, around=lambda forward, *args, **others: forward(*args, **others)):
        """Gives the adapter of vLLM the GPU. `around` makes each layer's call."""
        # pylint: disable=import-outside-toplevel
        import mla_client.vllm.runtime
        from mla_client.vllm.backend import Impl
        forward = Impl.forward_mha

        def finished(*args, **others):
            around(forward, *args, **others)
            self.finish()
        Impl.forward_mha = finished
        mla_client.vllm.runtime.gpu_arguments = lambda: dict(self.options)
