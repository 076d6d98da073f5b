"""Which files of Python tests need not run again, because nothing that they read has changed.

A file with the constant INPUTS, a tuple of paths below the root, promises to read nothing of the
tree but itself and those paths; a folder stands for all files in it. After a run of the whole file
in which each case passed, its cases are kept in build/unchanged.json next to a hash of what it
read. While the hash is the same, `./dev test` counts the cases as passed without running them, as
Bazel does with its own tests. A fresh clone has no such file, so it runs everything.

The promise is checked in the process that runs the file: a module, a file or a listed folder
outside INPUTS makes the file fail, and so does such a path on the command line of a process that
it starts. What those processes read by themselves is not seen, so INPUTS has to name it. Such a
file is run in a folder outside the tree.
"""

import fcntl
import functools
import hashlib
import json
import os
import pathlib
import re
import site
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What every file is run by.
RUNNER = ("tests/run_python_tests.py", "tests/runner/unchanged.py", "tests/engines/environments.py",
          "client/python/pyproject.toml")
# Versions of all packages of the machine: compilers, interpreters and libraries.
PACKAGES = pathlib.Path("/var/lib/dpkg/status")
# Variables that change what tests do, or what the processes do that they start.
VARIABLES = re.compile(r"^(MLA_|UCX_|FAKE_|ROCM_|LD_|PYTHON|GRPC_|OMP_|OPENBLAS_|VLLM_|SGLANG_|HF_)"
                       r"|^PATH$|_(proxy|PROXY)$")
# Variables that name programs outside the tree. A file is always run with one of them.
PROGRAMS = re.compile(r"_UNDER_TEST$|^MLA_CLIENT_LIBRARY$")
# Built programs lie outside the tree, where this link leads.
BUILT = ROOT / ".bazel/bin"
# A folder of results, which tests write to. Its tools are inputs.
SCRATCH, TOOLS = ROOT / "build", ROOT / "build/tools"
KEPT = "build/unchanged.json"


def files_of(path):
    """The files that an input stands for, in a fixed order; what Python compiles is left out."""
    if path.is_dir():
        for entry in sorted(path.iterdir()):
            if entry.name != "__pycache__":
                yield from files_of(entry)
    elif path.suffix != ".pyc":
        yield path


@functools.lru_cache(maxsize=None)
def _digest(path, _size, _changed_ns, _inode):
    """A hash of a file's content. Many files of tests have the same inputs."""
    return hashlib.sha256(path.read_bytes()).digest()


def digest(path):
    """A hash of the content that a file has now."""
    status = path.stat()
    return _digest(path, status.st_size, status.st_mtime_ns, status.st_ino)


def _python_packages():
    """Names and versions of the packages that Python finds without the machine's packager."""
    folders = [site.getusersitepackages(), *site.getsitepackages(),
               *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return sorted(str(path) for folder in folders if folder
                  for path in pathlib.Path(folder).glob("*.dist-info"))


def key_of(test, inputs, environment=""):
    """A hash of all that a file of tests depends on. None if one of its inputs is missing, or if a
    variable names a program outside the tree: the file is run then.
    `environment` names the packages that it is run with, other than those of the machine."""
    if any(PROGRAMS.search(name) for name in os.environ):
        return None
    state = hashlib.sha256()

    def add(*parts):
        for part in parts:
            state.update(len(part).to_bytes(8, "little") + part)

    add(sys.version.encode(), environment.encode(), str(os.geteuid()).encode())
    add(*(part.encode() for part in (*os.uname(), *_python_packages())))
    for name, value in sorted(os.environ.items()):
        if VARIABLES.search(name):
            add(name.encode(), value.encode())
    if PACKAGES.is_file():
        add(digest(PACKAGES))
    own = str(test.relative_to(ROOT))
    for name in sorted({*inputs, *RUNNER, own}):
        if not (ROOT / name).exists():
            return None
        for path in files_of(ROOT / name):
            if path.exists():  # not a link that leads nowhere
                add(os.fsencode(path.relative_to(ROOT)), digest(path))
    return state.hexdigest()


class Kept:
    """Cases of files whose last run passed, by the name of the run."""

    def __init__(self):
        self._path = ROOT / KEPT
        self._runs = self._read()

    def _read(self):
        try:
            return json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def cases(self, name, key):
        """The records of the run with this key, or None."""
        run = self._runs.get(name)
        return run["cases"] if run and key and run["key"] == key else None

    def put(self, name, key, records):
        """Keeps a run in which every case passed. Any other one is forgotten. Runs of two
        terminals may call this at the same time."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._runs = self._read()
            if key and records and not any(kind for kind, _, _ in records.values()):
                self._runs[name] = {"key": key, "cases": records}
            else:
                self._runs.pop(name, None)
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(self._runs), encoding="utf-8")
            part.replace(self._path)


class Watch:
    """Notes what this process reads of the tree outside the inputs. It watches until the process
    ends, because Python has no way to take a hook of audits back."""

    def __init__(self, test, inputs):
        self._allowed = [ROOT / name for name in (*inputs, *RUNNER)] + [test]
        self._seen = set()
        sys.addaudithook(self._hook)

    def _inside(self, path):
        return any(path == allowed or allowed in path.parents for allowed in self._allowed)

    def _note(self, name, folder="."):
        if not isinstance(name, (str, bytes, os.PathLike)):
            return  # an open file, by its number
        path = pathlib.Path(os.path.abspath(os.path.join(folder, os.fsdecode(name))))
        built = BUILT.resolve()
        if built in path.parents:  # a resolved link
            path = BUILT / path.relative_to(built)
        if ROOT not in path.parents or "__pycache__" in path.parts:
            return
        if SCRATCH in (path, *path.parents) and TOOLS not in path.parents:
            return
        if not self._inside(path):
            self._seen.add(str(path.relative_to(ROOT)))

    def _hook(self, event, arguments):
        if event in ("os.listdir", "os.scandir"):
            # Searches for modules and for packages list every folder of the path, whatever is
            # there; the modules that they find are looked at in the end.
            folder = "." if arguments[0] is None else arguments[0]
            if folder not in sys.path and os.path.isdir(folder):
                self._note(folder)
        elif event in ("open", "ctypes.dlopen"):
            # pylint: disable=protected-access
            if not sys._getframe(1).f_code.co_filename.startswith("<frozen importlib"):
                self._note(arguments[0])
        elif event == "subprocess.Popen":
            _, command, folder, _ = arguments
            folder = os.fsdecode(folder or ".")
            words = [command] if isinstance(command, (str, bytes)) else command
            for word in words:
                if os.path.exists(os.path.join(folder, os.fsdecode(word))):
                    self._note(word, folder)

    def outside(self):
        """The paths that were read outside the inputs, sorted."""
        for module in list(sys.modules.values()):
            source = getattr(module, "__file__", None)
            if source:
                self._note(source)
        return sorted(self._seen)
