"""A plugin of SGLang for tests: chains the adapter's calls, on a fake GPU.

MLA_TEST_KILL="PASS LAYER PID" of the environment: at this layer of this pass the server, a process
of that number, is killed, once.
"""

import os
import pathlib
import signal
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]


def register():
    """The entry point; the rest is done in processes that have a model."""
    # pylint: disable=import-outside-toplevel
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.__init__", _install,
                          HookType.AROUND)


def _install(made, *args, **kwargs):
    # pylint: disable=import-outside-toplevel
    sys.path.append(str(ROOT / "tests/vllm/chained"))
    from fake_gpu import FakeGpu
    from mla_client import pytorch
    from mla_client.sglang import runtime

    gpu, attend, chained = FakeGpu(), runtime.Runtime.attend, pytorch.FastPath.attend
    runtime.gpu_arguments = lambda: dict(gpu.options)
    kill = [int(number) for number in os.environ.get("MLA_TEST_KILL", "").split()]

    def finished(self, layer, q, kv):
        if kill and [self.worker.passes.counts["passes"], layer] == kill[:2]:
            os.kill(kill[2], signal.SIGKILL)
            kill.clear()
        output = attend(self, layer, q, kv)
        gpu.finish()
        return output

    def told(*given):
        pytorch.FastPath.attend = chained
        print("a call is chained", flush=True)
        return chained(*given)
    runtime.Runtime.attend, pytorch.FastPath.attend = finished, told
    return made(*args, **kwargs)
