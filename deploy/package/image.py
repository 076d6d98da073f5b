"""The OCI image of the CPU server, made as root without a daemon.

mmdebstrap unpacks the packages of the libraries that the two binaries link, from this machine's
own package sources; buildah makes the image. No package's scripts run, and nothing else is inside:
no shell, no package manager. What dpkg would know of the packages is kept for scanners.
"""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile

import common
import sbom

# Kept of usr/share: licences, which their terms ask for. Everything else is for people.
DOCUMENTS = ("changelog", "NEWS", "README", "TO" + "DO", "examples", "AUTHORS", "NOTICE", "FAQ")
REMOVED = ("dev", "etc/apt", "etc/dpkg", "usr/share/man", "usr/share/locale", "usr/share/info",
           "usr/share/lintian", "usr/share/bug", "usr/share/gcc", "usr/share/gdb",
           "usr/lib/{multiarch}/gconv", "usr/bin", "usr/sbin", "var/cache", "var/lib/apt")
SETTINGS = {
    "MLA_SERVER_UNIX_PATH": "/run/mla/mla.sock", "MLA_TARGET": "unix:/run/mla/mla.sock",
    "MLA_LOG_FORMAT": "json", "PATH": "/usr/local/bin"}
CONFIGURATION = "/etc/mla-server/server.yaml"
GRPC_PORT = 50551
KEEP_PACKAGES = '#!/bin/sh\nset -e\ncp "$1"/var/cache/apt/archives/*.deb "$PACKAGE_FOLDER"\n'


def sources():
    """This machine's package sources: the files that apt reads."""
    folder = pathlib.Path("/etc/apt")
    files = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*.list")),
             *sorted((folder / "sources.list.d").glob("*.sources"))]
    found = [path for path in files if path.is_file() and path.stat().st_size > 0]
    if not found:
        raise common.PackageError("image: apt on this machine has no package sources")
    return found


def suite():
    """The name of this machine's release, whose libraries the binaries were linked to."""
    text = pathlib.Path("/etc/os-release").read_text(encoding="utf-8")
    return re.search(r'^VERSION_CODENAME="?(\w+)', text, re.M).group(1)


def unpack(packages, root, folder, release=None, archives=None, options=()):
    """Unpacks the packages and what they depend on below `root`; returns their control files. By
    default they are of this machine's release and package sources. `options` are mmdebstrap's."""
    kept = folder / "packages"
    kept.mkdir()
    hook = folder / "keep_packages"
    hook.write_text(KEEP_PACKAGES, encoding="utf-8")
    hook.chmod(0o755)
    common.run("mmdebstrap", "--variant=extract", "--mode=root", "--format=directory",
               *options, f"--include={packages}", f"--extract-hook={hook}",
               release or suite(), root, *(archives or sources()),
               env={**os.environ, "PACKAGE_FOLDER": str(kept)})
    return {path.name: common.run("dpkg-deb", "--field", path) for path in
            sorted(kept.glob("*.deb"))}


def prune(root, multiarch):
    for name in REMOVED:
        shutil.rmtree(root / name.format(multiarch=multiarch), ignore_errors=True)
    for path in (root / "usr/share/doc").rglob("*"):
        if path.is_file() and path.name.startswith(DOCUMENTS):
            path.unlink()
    # The clients' halves of libraries that the server has no use for would need their own care.
    for path in (root / "usr/lib" / multiarch).glob("libgrpc*_unsecure.so*"):
        path.unlink()


def write(root, name, text, mode=0o644):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


def fill(root, controls):
    """The product's own files, the user, and what dpkg would know."""
    for binary in ("server/mla-server", "client/mlactl/mlactl"):
        common.stripped(common.BINARIES / binary, root / "usr/local/bin" / binary.split("/")[-1])
    write(root, "etc/passwd", "root:x:0:0::/:/nonexistent\n"
          f"mla:x:{common.USER}:{common.USER}::/nonexistent:/nonexistent\n")
    write(root, "etc/group", f"root:x:0:\nmla:x:{common.USER}:\n")
    write(root, "etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")
    write(root, CONFIGURATION[1:],
          (common.ROOT / "deploy/config/example.yaml").read_text(encoding="utf-8"))
    status = [re.sub(r"^(Package: .*)$", r"\1\nStatus: install ok installed", text, count=1,
                     flags=re.M) for text in controls.values()]
    write(root, "var/lib/dpkg/status", "\n\n".join(status) + "\n")
    write(root, "usr/share/doc/mla-server/copyright",
          (common.ROOT / "LICENSE").read_text(encoding="utf-8"))
    bill = sbom.document(common.NAME, common.version(), common.revision(), common.epoch(),
                         controls.values(), common.LICENCE)
    write(root, "usr/share/doc/mla-server/sbom.spdx.json", bill)
    for name, mode in (("tmp", 0o1777), ("run/mla", 0o750), ("proc", 0o555), ("sys", 0o555),
                       ("dev", 0o755)):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(mode)
    os.chown(root / "run/mla", common.USER, common.USER)
    return bill


def labels():
    return {
        "org.opencontainers.image.title": common.NAME,
        "org.opencontainers.image.description": common.HOME,
        "org.opencontainers.image.version": common.version(),
        "org.opencontainers.image.revision": common.revision(),
        "org.opencontainers.image.licenses": common.LICENCE,
        "org.opencontainers.image.vendor": "mla-server developers"}


def commit(root, archive, folder, name=common.NAME, **more):
    """Makes an image of the tree and writes it to `archive`; returns the image's digest. `more` are
    further variables of its environment."""
    place = ("--root", folder / "storage", "--runroot", folder / "state",
             "--storage-driver", "vfs")
    container = common.run("buildah", *place, "from", "scratch")
    mounted = common.run("buildah", *place, "mount", container)
    common.run("cp", "--archive", f"{root}/.", mounted)
    common.run("buildah", *place, "umount", container)
    options = [f"--user={common.USER}:{common.USER}", "--stop-signal=SIGTERM", "--volume=/run/mla",
               f"--port={GRPC_PORT}", "--cmd=",
               f'--entrypoint=["mla-server", "--config={CONFIGURATION}"]']
    options += [f"--env={name}={value}" for name, value in {**SETTINGS, **more}.items()]
    options += [f"--label={name}={value}" for name, value in labels().items()]
    common.run("buildah", *place, "config", *options, container)
    digest_file = folder / "digest"
    image = common.run("buildah", *place, "commit", f"--timestamp={common.epoch()}",
                       "--format=oci", "--quiet", container)
    common.run("buildah", *place, "push", f"--digestfile={digest_file}", image,
               f"oci-archive:{archive}:{name}:{common.version()}")
    return digest_file.read_text(encoding="utf-8").strip()


def archive_in(output, name):
    """The path of the image `name` in `output`, where none is any more."""
    if os.geteuid() != 0:
        raise common.PackageError(f"image {name}: mmdebstrap and buildah are run as root here")
    output.mkdir(parents=True, exist_ok=True)
    archive = output / f"{name}-{common.version()}-{common.architecture()}.oci.tar"
    archive.unlink(missing_ok=True)
    return archive


def libraries(folder):
    """The packages of the libraries that both programs link, with commas."""
    needed = common.library_packages(folder / "links", common.BINARIES / "server/mla-server",
                                     common.BINARIES / "client/mlactl/mlactl")
    return ",".join(part.split()[0] for part in needed.split(", "))


def build(output):
    """Writes the image and its bill of materials to `output`; returns the image's path."""
    archive = archive_in(output, common.NAME)
    multiarch = common.run("gcc", "-print-multiarch")
    with tempfile.TemporaryDirectory(prefix="mla-image-", dir=output) as folder:
        folder = pathlib.Path(folder)
        root = folder / "root"
        controls = unpack(libraries(folder), root, folder)
        prune(root, multiarch)
        bill = fill(root, controls)
        common.set_times(root, common.epoch())
        size = int(subprocess.run(["du", "-s", "--apparent-size", "-B1", root], check=True,
                                  text=True, stdout=subprocess.PIPE).stdout.split()[0])
        identity = commit(root, archive, folder)
        subprocess.run(["chmod", "-R", "u+w", folder], check=False)
    bill_path = output / f"{common.NAME}-{common.version()}.spdx.json"
    bill_path.write_text(bill, encoding="utf-8")
    common.report(archive)
    print(f"{size / 1e6:8.1f} MB unpacked, digest {identity}", flush=True)
    return archive
