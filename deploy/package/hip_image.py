"""An image with a GPU runtime from Debian's development release: HIP 6.4.3, which drives gfx942.

The image to ship is the Dockerfile's `rocm` target, over AMD's own runtime. This one needs Debian's
packages alone, and proves that the server finds a runtime in an image, with its libraries, as a
user without rights. The runtime needs a newer C library than the release that the
binaries were linked on. So the system is the development release's, and libraries of the older
release that it lacks lie in a folder of their own.
"""

import pathlib
import re
import shutil
import tempfile

import common
import image

RUNTIME = "libamdhip64-6"
SUITE = "sid"
LIBRARIES = "usr/local/lib/mla-server"
# Its lists expire after a week, which a mirror may exceed. Signatures are checked as always.
STALE_MIRROR = '--aptopt=Acquire::Check-Valid-Until "false"'
SHARED_OBJECT = re.compile(r"lib.+\.so\.[0-9.]+")


def sources_of(suite, folder):
    """This machine's package sources, for another suite: the path of a file in `folder`. Archives
    of security updates have no such suite."""
    for path in image.sources():
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".sources":
            for stanza in text.split("\n\n"):
                if re.search(r"^URIs:", stanza, re.M) and "security" not in stanza:
                    target = folder / f"{suite}.sources"
                    target.write_text(re.sub(r"^Suites:.*$", f"Suites: {suite}", stanza,
                                             flags=re.M) + "\n", encoding="utf-8")
                    return target
        for line in text.splitlines():
            found = re.match(r"deb (\[.*?\] )?(\S+) \S+ ", line)
            if found and "security" not in line:
                target = folder / f"{suite}.list"
                target.write_text(f"deb {found[1] or ''}{found[2]} {suite} main\n",
                                  encoding="utf-8")
                return target
    raise common.PackageError(f"hip image: no package source here could have {suite}")


def shared_objects(root, multiarch):
    """The shared objects of a root, by name."""
    return {path.name: path for name in (f"usr/lib/{multiarch}", f"lib/{multiarch}")
            for path in (root / name).glob("lib*.so*") if SHARED_OBJECT.fullmatch(path.name)}


def add_missing(stable, root, multiarch):
    """Copies the shared objects of the older release that `root` lacks."""
    target = root / LIBRARIES
    target.mkdir(parents=True)
    there = shared_objects(root, multiarch)
    for name, path in shared_objects(stable, multiarch).items():
        if name not in there:
            shutil.copy(path.resolve(), target / name)


def link_usr(root):
    """Makes /lib and /lib64, where programs look for their loader: newer releases leave these links
    to the package base-files, which is not inside."""
    for name in ("lib", "lib64"):
        if not (root / name).exists() and (root / "usr" / name).exists():
            (root / name).symlink_to(f"usr/{name}")


def build(output):
    """Writes the image to `output`; returns its path."""
    archive = image.archive_in(output, f"{common.NAME}-hip")
    multiarch = common.run("gcc", "-print-multiarch")
    with tempfile.TemporaryDirectory(prefix="mla-hip-image-", dir=output) as folder:
        folder = pathlib.Path(folder)
        for name in ("stable", "runtime"):
            (folder / name).mkdir()
        stable, root = folder / "stable/root", folder / "runtime/root"
        controls = image.unpack(image.libraries(folder), stable, folder / "stable")
        controls |= image.unpack(RUNTIME, root, folder / "runtime", SUITE,
                                 [sources_of(SUITE, folder)], [STALE_MIRROR])
        link_usr(root)
        add_missing(stable, root, multiarch)
        image.prune(root, multiarch)
        image.fill(root, controls)
        common.set_times(root, common.epoch())
        identity = image.commit(root, archive, folder, f"{common.NAME}-hip",
                                LD_LIBRARY_PATH=f"/{LIBRARIES}")
        common.run("chmod", "-R", "u+w", folder)
    common.report(archive)
    print(f"digest {identity}", flush=True)
    return archive
