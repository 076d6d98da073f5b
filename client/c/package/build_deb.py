"""Makes the Debian package of the C library from what Bazel built.

    build_deb.py --library .bazel/bin/client/c/libmla_client.so --output build

The package holds the library, its header and the files of pkg-config and CMake. They find each
other by relative paths, so it may be unpacked anywhere.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
NAME = "libmla-client"
CONTROL = """Package: {name}
Version: {version}
Architecture: {architecture}
Maintainer: mla-server developers <mla-server@localhost>
Depends: {depends}
Section: libdevel
Priority: optional
Multi-Arch: same
Installed-Size: {kilobytes}
Description: C client of mla-server
 Library, header, pkg-config and CMake files for programs that have MLA
 attention over a paged KV cache computed by mla-server.
"""


def output_of(*command, cwd=None):
    return subprocess.run([str(part) for part in command], cwd=cwd, check=True, text=True,
                          stdout=subprocess.PIPE).stdout.strip()


def version():
    text = (HERE.parent / "version.h").read_text()
    return re.search(r'kVersion\[\] = "([0-9.]+)"', text).group(1)


def soname_of(library):
    found = re.search(r"\(SONAME\).*\[(.+)\]", output_of("readelf", "-d", library))
    return found.group(1)


def dependencies(library, folder):
    """Dependencies that dpkg-shlibdeps finds for the library."""
    (folder / "debian").mkdir()
    control = f"Source: {NAME}\n\nPackage: {NAME}\nArchitecture: any\n"
    (folder / "debian/control").write_text(control)
    found = output_of("dpkg-shlibdeps", "-O", "--warnings=0", f"-e{library}", cwd=folder)
    return found.split("=", 1)[1]


def fill(root, library, triplet):
    """Lays the files of the package out below `root`."""
    number = version()
    libraries = root / "usr/lib" / triplet
    soname = soname_of(library)
    values = {"VERSION": number, "TRIPLET": triplet, "SOVERSION": soname.rsplit(".", 1)[1]}

    def place(template, target):
        text = (HERE / template).read_text()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(re.sub(r"@([A-Z]+)@", lambda found: values[found.group(1)], text))

    libraries.mkdir(parents=True)
    installed = libraries / f"libmla_client.so.{number}"
    subprocess.run(["strip", "--strip-unneeded", "-o", installed, library], check=True)
    installed.chmod(0o644)
    (libraries / soname).symlink_to(installed.name)
    (libraries / "libmla_client.so").symlink_to(soname)
    place("mla_client.pc.in", libraries / "pkgconfig/mla_client.pc")
    for name in ("mla_client-config.cmake", "mla_client-config-version.cmake"):
        place(f"{name}.in", libraries / "cmake/mla_client" / name)
    (root / "usr/include").mkdir()
    for header in ("mla_client.h", "mla_ring.h"):
        shutil.copy(HERE.parent / header, root / "usr/include")
    documents = root / "usr/share/doc" / NAME
    documents.mkdir(parents=True)
    shutil.copy(ROOT / "LICENSE", documents / "copyright")
    return installed


def build(library, output):
    """Returns the path of the package."""
    architecture = output_of("dpkg", "--print-architecture")
    triplet = output_of("gcc", "-print-multiarch")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        root = folder / "root"
        installed = fill(root, library, triplet)
        size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        (root / "DEBIAN").mkdir()
        (root / "DEBIAN/control").write_text(CONTROL.format(
            name=NAME, version=version(), architecture=architecture,
            depends=dependencies(installed, folder), kilobytes=-(-size // 1024)))
        (root / "DEBIAN/triggers").write_text("activate-noawait ldconfig\n")
        root.chmod(0o755)
        # Two builds of one commit give the same bytes.
        if "SOURCE_DATE_EPOCH" in os.environ:
            seconds = int(os.environ["SOURCE_DATE_EPOCH"])
            for path in [root, *root.rglob("*")]:
                os.utime(path, (seconds, seconds), follow_symlinks=False)
        output.mkdir(parents=True, exist_ok=True)
        package = output / f"{NAME}_{version()}_{architecture}.deb"
        output_of("dpkg-deb", "--root-owner-group", "--build", root, package)
    return package


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--library", type=pathlib.Path,
                        default=ROOT / ".bazel/bin/client/c/libmla_client.so")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "build")
    args = parser.parse_args()
    print(build(args.library.resolve(), args.output))


if __name__ == "__main__":
    main()
