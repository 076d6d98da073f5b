"""What all packages share: where things are, the version, the revision, and one time for all files.

Files in packages have the time of the commit, never of the build, so that two builds of one commit
give the same bytes.
"""

import hashlib
import os
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARIES = ROOT / ".bazel/bin"
NAME = "mla-server"
HOME = "MLA attention server"
LICENCE = "Apache-2.0"
NUMBER = ""  # the version of the packages, if they are not of this tree
USER = 65532  # of the server in images; without rights, and no user of Debian's


class PackageError(Exception):
    """A package cannot be made here; the text says why."""


def run(*command, **options):
    """Runs a command to its end. PackageError has what it wrote if it fails."""
    words = [str(part) for part in command]
    done = subprocess.run(words, check=False, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, **options)
    if done.returncode != 0:
        raise PackageError(f"{' '.join(words[:4])} ...: status {done.returncode}\n{done.stderr}")
    return done.stdout.strip()


def version():
    """Returns the version that the packages have."""
    if NUMBER:
        return NUMBER
    text = (ROOT / "base/version/version.h").read_text(encoding="utf-8")
    return re.search(r'kVersion\[\] = "([0-9.]+)"', text).group(1)


def revision():
    """Returns the revision that the binary was built from, which may not be checked out now."""
    shown = run(BINARIES / "server/mla-server", "--version")
    found = re.search(r"^revision (\S+)$", shown, re.M)
    return found.group(1) if found else "unknown"


def epoch():
    """Seconds since 1970 that every file of a package has. SOURCE_DATE_EPOCH goes first."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return int(given or run("git", "log", "-1", "--format=%ct", cwd=ROOT))


def architecture():
    return run("dpkg", "--print-architecture")


def set_times(folder, seconds):
    """Gives every file below `folder`, and itself, the same time."""
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (seconds, seconds), follow_symlinks=False)


def digest(path):
    """The SHA-256 of a file, in hexadecimal."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def report(path):
    """Prints what was made: its size, its digest, its name."""
    print(f"{path.stat().st_size / 1e6:8.1f} MB  sha256:{digest(path)}  {path.name}", flush=True)


def library_packages(folder, *binaries):
    """Debian packages of the libraries that the binaries link, as a Depends field has them."""
    (folder / "debian").mkdir(parents=True)
    control = f"Source: {NAME}\n\nPackage: {NAME}\nArchitecture: any\n"
    (folder / "debian/control").write_text(control, encoding="utf-8")
    found = run("dpkg-shlibdeps", "-O", "--warnings=0", *(f"-e{path}" for path in binaries),
                cwd=folder)
    return found.split("=", 1)[1]


def stripped(binary, target):
    """Writes `binary` without its symbols to `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    run("strip", "--strip-unneeded", "-o", target, binary)
    target.chmod(0o755)
    return target
