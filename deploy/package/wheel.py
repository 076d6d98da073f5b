"""The wheel and the source distribution of the Python client, by pip's own builder."""

import gzip
import io
import pathlib
import shutil
import tarfile
import tempfile

import common

CLIENT = common.ROOT / "client/python"


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
        script = ("import build_backend, sys; folder = sys.argv[1]; "
                  "build_backend.build_sdist(folder); build_backend.build_wheel(folder)")
        common.run("/usr/bin/python3", "-c", script, folder, cwd=source)
        made = [*folder.glob("*.tar.gz"), *folder.glob("*.whl")]
        if len(made) != 2:
            raise common.PackageError(f"wheel: got {[path.name for path in made]}")
        with_one_time(made[0])
        made = [shutil.copy(path, output) for path in made]
    for path in made:
        common.report(pathlib.Path(path))
    return [pathlib.Path(path) for path in made]
