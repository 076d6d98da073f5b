"""The wheel and the source distribution of the Python client, by pip's own builder.

The wheel takes the C library's rings along, in mla_client/native, with the shared libraries that
it needs and a manylinux system need not have. So it is one of the build machine's architecture and
C library; the source distribution is without.
"""

import gzip
import io
import os
import pathlib
import platform
import re
import shutil
import tarfile
import tempfile

import common

CLIENT = common.ROOT / "client/python"
LIBRARY = "client/c/libmla_ring.so"
NATIVE = "mla_client/native"
# Libraries that every manylinux system has (PEP 600).
EVERYWHERE = re.compile(
    r"(libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+|libz|ld-linux.*)\.so\..*")
TAGS = '''"""Tags of a wheel for any Python 3 of one system."""
from setuptools import setup
from wheel.bdist_wheel import bdist_wheel


class Tagged(bdist_wheel):
    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        return "py3", "none", "{platform}"


setup(cmdclass={{"bdist_wheel": Tagged}})
'''


def with_one_time(archive):
    """Writes a source distribution again: sorted, of no user, with the time of the commit."""
    with tarfile.open(archive) as before:
        members = [(member, before.extractfile(member).read() if member.isfile() else None)
                   for member in sorted(before.getmembers(), key=lambda member: member.name)]
    with archive.open("wb") as file, \
            gzip.GzipFile("", "wb", 9, file, mtime=common.epoch()) as packed, \
            tarfile.open(mode="w", fileobj=packed, format=tarfile.PAX_FORMAT) as after:
        for member, data in members:
            member.mtime, member.pax_headers = common.epoch(), {}
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            after.addfile(member, io.BytesIO(data) if data is not None else None)


def bundled(library):
    """Paths of the shared libraries that travel with it."""
    found = []
    for line in common.run("ldd", library).splitlines():
        name, _, rest = line.strip().partition(" => ")
        if not rest or EVERYWHERE.fullmatch(name):
            continue
        if not rest.startswith("/"):
            raise common.PackageError(f"wheel: {name}, which the library needs, is not here")
        found.append(pathlib.Path(rest.split(" ")[0]))
    return found


def notices(libraries):
    """The copyright files of the Debian packages that the libraries are from, by package."""
    owners = {common.run("dpkg", "-S", path.resolve()).split(":")[0] for path in libraries}
    return {owner: pathlib.Path(f"/usr/share/doc/{owner}/copyright") for owner in sorted(owners)}


def add_library(source):
    """Puts the C library into the package at `source`, and names the system that it is for."""
    library = common.BINARIES / LIBRARY
    if not library.exists():
        raise common.PackageError(f"wheel: there is no {library}; ./dev package builds it")
    native, libraries = source / NATIVE, bundled(library)
    common.stripped(library, native / "libmla_client.so.0")
    for path in libraries:
        common.stripped(path.resolve(), native / path.name)
    (native / "licences").mkdir()
    for owner, path in notices(libraries).items():
        shutil.copyfile(path, native / "licences" / owner)
    version = os.confstr("CS_GNU_LIBC_VERSION").split()[1].replace(".", "_")
    (source / "setup.py").write_text(
        TAGS.format(platform=f"manylinux_{version}_{platform.machine()}"), encoding="utf-8")


def build(output):
    """Writes both to `output`; returns their paths."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mla-wheel-") as folder:
        folder = pathlib.Path(folder)
        # A copy, since setuptools leaves its own files in the folder that it builds.
        source = folder / "repository/client/python"
        shutil.copytree(CLIENT, source, ignore=shutil.ignore_patterns(
            "tests", "__pycache__", "build", "*.egg-info", "gen"))
        shutil.copytree(common.ROOT / "proto", folder / "repository/proto")
        # setuptools changes sys.argv as it runs.
        script = "import build_backend, sys; build_backend.build_{kind}(sys.argv[1])"
        common.run("/usr/bin/python3", "-c", script.format(kind="sdist"), folder, cwd=source)
        add_library(source)
        common.run("/usr/bin/python3", "-c", script.format(kind="wheel"), folder, cwd=source)
        made = [*folder.glob("*.tar.gz"), *folder.glob("*.whl")]
        if len(made) != 2:
            raise common.PackageError(f"wheel: got {[path.name for path in made]}")
        with_one_time(made[0])
        # The pages install build/package/mla_client-*.whl, so one of another release must go.
        for pattern in ("mla_client-*.whl", "mla_client-*.tar.gz"):
            for old in pathlib.Path(output).glob(pattern):
                old.unlink()
        made = [shutil.copy(path, output) for path in made]
    for path in made:
        common.report(pathlib.Path(path))
    return [pathlib.Path(path) for path in made]
