"""The packages of ./dev package: installed in a clean root, run as an image, the same twice.

These tests need root and download from the machine's package sources, so they belong to the longer
runs (MLA_TEST_LONG). PackageTextsTest runs always.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "deploy/package"), str(ROOT / "tests/releases")]

# pylint: disable=wrong-import-position
import common  # noqa: E402
import debian  # noqa: E402
import image  # noqa: E402
import release  # noqa: E402
import sbom  # noqa: E402
import sides  # noqa: E402
import wheel as wheel_rules  # noqa: E402

LONG = os.environ.get("MLA_TEST_LONG", "") != ""
BINARIES = pathlib.Path(os.environ.get("BINARIES_UNDER_TEST", ROOT / ".bazel/bin"))
MOST_IMAGE_BYTES = 80_000_000
SMALL = ["--kv-cache-bytes=64MiB", "--limits-weights-bytes=64MiB"]


def run(*command, check=True, **options):
    done = subprocess.run([str(part) for part in command], text=True, check=False,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, **options)
    if check and done.returncode != 0:
        raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def package(kind, output, binaries=BINARIES, *more):
    """Runs package.py, which fills the folder `output`. Returns what it prints."""
    # One time for all calls: a commit may come between two of them.
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1795900000"}
    return run("/usr/bin/python3", ROOT / "deploy/package/package.py", kind, "--output", output,
               "--binaries", binaries, *more, env=environment)


class PackageTextsTest(unittest.TestCase):
    def test_every_command_of_the_help_gets_a_page(self):
        text = ("  info                      what the server is\n"
                "  set-quota TENANT          bounds of one tenant\n"
                "  drop-checkpoints SEQUENCES\n                            remove checkpoints\n"
                "  evict-model TENANT MODEL  release a model\n"
                "  --target=ADDRESS          host:port\n")
        self.assertEqual(debian.COMMAND.findall(text), [
            ("info", "what the server is"), ("set-quota", "bounds of one tenant"),
            ("drop-checkpoints", "remove checkpoints"), ("evict-model", "release a model")])

    def test_bill_of_materials_names_every_package(self):
        controls = ["Package: b\nVersion: 2-1\nArchitecture: amd64\nMaintainer: B <b@x>",
                    "Package: a\nVersion: 1\nArchitecture: all\nMaintainer: A <a@x>"]
        text = sbom.document("mla-server", "0.2.0", "abc", 0, controls, "Apache-2.0")
        self.assertEqual(text, sbom.document("mla-server", "0.2.0", "abc", 0, controls[::-1],
                                             "Apache-2.0"))
        bill = json.loads(text)
        self.assertEqual(bill["spdxVersion"], "SPDX-2.3")
        self.assertEqual([item["name"] for item in bill["packages"]], ["mla-server", "a", "b"])
        self.assertEqual(len(bill["relationships"]), 3)
        self.assertEqual(bill["packages"][2]["externalRefs"][0]["referenceLocator"],
                         "pkg:deb/debian/b@2-1?arch=amd64")
        identities = [item["SPDXID"] for item in bill["packages"]]
        self.assertEqual(len(set(identities)), 3)

    def test_no_source_of_packages_is_written_down(self):
        for path in [*(ROOT / "deploy/package").rglob("*"), ROOT / "deploy/container/Dockerfile"]:
            if path.suffix in (".py", "") and path.is_file():
                text = path.read_text(encoding="utf-8")
                self.assertEqual(re.findall(r"https?://|\b[\w.-]+\.(?:org|io|com)/", text), [], path)

    def test_image_is_configured_as_the_dockerfile(self):
        text = (ROOT / "deploy/container/Dockerfile").read_text(encoding="utf-8")
        for name, value in image.SETTINGS.items():
            if name != "PATH":
                self.assertIn(f"{name}={value}", text)
        self.assertIn(f"USER {common.USER}:{common.USER}\n", text)
        self.assertIn(f'"--config={image.CONFIGURATION}"', text)
        self.assertIn(f"EXPOSE {image.GRPC_PORT}\n", text)


class LongTest(unittest.TestCase):
    """Gives a test its folder for packages. Skips it in the quick run and without root or tools."""

    tools = ()

    def setUp(self):
        missing = [tool for tool in self.tools if shutil.which(tool) is None]
        if not LONG:
            self.skipTest("part of the longer runs: ./dev test --all")
        if os.geteuid() != 0 or missing:
            self.skipTest(f"needs root and {', '.join(missing) or 'nothing else'}")
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="mla-packages-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)


class PodmanTest(LongTest):
    """Has podman with a store of its own."""

    tools = ("buildah", "mmdebstrap", "podman", "runc")

    def podman(self, *words, check=True):
        state = [f"--root={self.folder}/storage", f"--runroot={self.folder}/state",
                 "--storage-driver=vfs", "--runtime=runc", "--cgroup-manager=cgroupfs",
                 "--events-backend=file"]
        return run("podman", *state, *words, check=check)

    def start(self, archive, name):
        """Loads an image and starts it as `server`, without rights; returns once it serves."""
        self.podman("load", "-i", archive)
        self.podman("run", "--detach", "--name=server", "--read-only", "--cap-drop=ALL",
                    "--security-opt=no-new-privileges", "--network=none",
                    f"--volume={self.sockets()}:/run/mla",
                    "--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096", name, *SMALL)
        self.addCleanup(self.podman, "rm", "--force", "server", check=False)
        for _ in range(100):
            if "SERVING\n" == self.podman("exec", "server", "mlactl", "health", check=False):
                return
            time.sleep(0.2)
        self.fail(self.podman("logs", "server"))

    def sockets(self):
        """A folder of the host's for the image's sockets."""
        folder = self.folder / "sockets"
        folder.mkdir(exist_ok=True)
        os.chown(folder, 65532, 65532)
        return folder

    def stop(self):
        """Stops it; it must have drained and ended with 0."""
        self.podman("stop", "--time=40", "server")
        state = self.podman("inspect", "--format={{.State.ExitCode}}", "server").strip()
        self.assertEqual(state, "0", self.podman("logs", "server"))
        self.assertIn('"event":"drained"', self.podman("logs", "server"))


class ImageTest(PodmanTest):
    @staticmethod
    def identity(output):
        """The digest of the image in the archive that is there, its manifest and configuration."""
        (archive,) = output.glob("*.oci.tar")
        with tarfile.open(archive) as tar:
            def read(name):
                return json.load(tar.extractfile(name))
            (entry,) = read("index.json")["manifests"]
            manifest = read("blobs/" + entry["digest"].replace(":", "/"))
            config = read("blobs/" + manifest["config"]["digest"].replace(":", "/"))
        return archive, entry["digest"], config

    def test_image_is_small_serves_without_rights_and_is_the_same_twice(self):
        package("image", self.folder / "one")
        package("image", self.folder / "two")
        archive, digest, config = self.identity(self.folder / "one")
        self.assertEqual(digest, self.identity(self.folder / "two")[1])
        self.assertEqual(config["config"]["User"], f"{common.USER}:{common.USER}")
        labels = config["config"]["Labels"]
        self.assertEqual(labels["org.opencontainers.image.version"], common.version())
        self.assertIn("org.opencontainers.image.revision", labels)
        name = f"localhost/mla-server:{common.version()}"
        self.start(archive, name)
        size = int(self.podman("image", "inspect", "--format", "{{.Size}}", name))
        self.assertLess(size, MOST_IMAGE_BYTES)
        self.assertIn("agree", self.podman("exec", "server", "mlactl", "attend"))
        # A worker of the host, with its tensors in shared memory.
        self.assertIn("over ring", run(ROOT / ".bazel/bin/client/mlactl/mlactl", "attend",
                                       f"--target=unix:{self.sockets()}/mla.sock"))
        mounted = pathlib.Path(self.podman("mount", "server").strip())
        status = (mounted / "var/lib/dpkg/status").read_text(encoding="utf-8")
        bill = json.loads((mounted / "usr/share/doc/mla-server/sbom.spdx.json").read_text())
        kept = set(re.findall(r"^Package: (\S+)$", status, re.M))
        self.assertEqual(kept, {item["name"] for item in bill["packages"]} - {common.NAME})
        self.assertIn("libc6", kept)
        self.assertFalse((mounted / "bin/sh").exists() or (mounted / "usr/bin/sh").exists())
        self.stop()


class HipImageTest(PodmanTest):
    def test_server_finds_the_gpu_runtime_of_its_image(self):
        """There is no GPU here: the runtime is opened, with its libraries, and finds no device."""
        package("hip-image", self.folder / "one")
        (archive,) = (self.folder / "one").glob("*.oci.tar")
        self.start(archive, f"localhost/mla-server-hip:{common.version()}")
        info = self.podman("exec", "server", "mlactl", "info")
        (hip,) = re.findall(r"^backend hip +(.*)$", info, re.M)
        self.assertNotIn("cannot open shared object", hip)
        self.assertIn("device", hip)
        said = self.podman("exec", "server", "mla-server", "--check-config", "--unix-path=")
        self.assertRegex(said, r"AMD GPUs: .*libamdhip64\.so\.6.* drive ")
        self.assertIn("agree", self.podman("exec", "server", "mlactl", "attend"))
        self.stop()


class DebianTest(LongTest):
    tools = ("mmdebstrap", "reprepro", "gpg", "help2man")

    def install(self, repository):
        """A clean root that has the packages of the repository; returns its folder."""
        root = self.folder / "root"
        source = self.folder / "mla.list"
        shutil.copytree(repository, self.folder / "apt")
        source.write_text(f"deb [signed-by={self.folder}/apt/mla-server.gpg] "
                          f"file:{self.folder}/apt stable main\n", encoding="utf-8")
        # The clean root: Debian's required packages, and apt with this repository as well.
        run("mmdebstrap", "--variant=apt", "--mode=root", "--format=directory",
            "--include=mla-server,mlactl,libmla-client",
            f"--setup-hook=mkdir -p '$1{self.folder}' && cp -r {self.folder}/apt '$1{self.folder}/'"
            .replace("'", '"'), image.suite(), root, *image.sources(), source)
        return root

    def offer(self, root, repository):
        """The packages that the root's apt finds from now on. The root's /tmp was emptied."""
        inside = pathlib.Path(f"{root}{self.folder}/apt")
        shutil.rmtree(inside, ignore_errors=True)
        shutil.copytree(repository, inside)

    def check_groups(self, root):
        """Every group that a unit of the package names is there."""
        for unit in (root / "lib/systemd/system").glob("mla-server*.service"):
            text = unit.read_text(encoding="utf-8")
            for group in re.search(r"^SupplementaryGroups=(.*)$", text, re.M).group(1).split():
                self.assertIn(f"{group}:", run("chroot", root, "getent", "group", group))

    def check_page(self, root, repository):
        """The commands of the page on packages install from a repository, also a second time."""
        page = (ROOT / "docs/install/packages.md").read_text(encoding="utf-8")
        (commands,) = re.findall(r"^(    install -d /srv/www (?:.*\n)*?)    systemctl", page, re.M)
        shutil.copytree(repository, root / "root/build/package/apt")
        for path in (root / "etc/apt").rglob("*.list"):  # those of `install` have another folder
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            path.write_text("".join(line for line in lines if str(self.folder) not in line),
                            encoding="utf-8")
        for _ in range(2):
            shown = run("chroot", root, "sh", "-ec", f"cd /root\n{commands}")
            self.assertIn("file:/srv/www/mla", shown)
        self.assertFalse((root / "srv/www/mla/apt").exists())

    def test_packages_are_installed_and_are_the_same_twice(self):
        output = self.folder / "packages"
        package("deb", output)
        first = {path.name: common.digest(path) for path in output.glob("*.deb")}
        again = self.folder / "again"
        package("deb", again)
        self.assertEqual({path.name: common.digest(path) for path in again.glob("*.deb")}, first)
        root = self.install(output / "apt")
        inside = ["chroot", root]
        self.assertIn(f"mla-server {common.version()}", run(*inside, "mla-server", "--version"))
        run(*inside, "mla-server", "--check-config", "--config=/etc/mla-server/server.yaml", *SMALL)
        self.check_groups(root)
        self.check_page(root, output / "apt")
        script = root / "usr/share/bash-completion/completions/mlactl"
        self.assertIn("complete", script.read_text(encoding="utf-8"))
        listed = run(*inside, "dpkg", "--listfiles", "mlactl", "mla-server")
        for page in ("man1/mlactl.1.gz", "man1/mlactl-set-quota.1.gz", "man8/mla-server.8.gz",
                     "man1/mlactl-announce.1.gz", "system/mla-server.service",
                     "system/mla-server@.service", "system/mla-announce@.service"):
            self.assertIn(page, listed)
        for program in ("usr/sbin/mla-place-instances", "usr/bin/mlactl-plot"):
            self.assertTrue(os.access(root / program, os.X_OK))

    def test_packages_of_the_last_release_are_upgraded_removed_and_purged(self):
        """Release 0.1.0 had no packages: its binaries are packaged by the rules of today."""
        build = release.Build(release.releases()[0])
        build.make(sides.CACHE, "//client/c:libmla_client.so")
        package("deb", self.folder / "old", build.source / ".bazel/bin", "--number", build.version)
        package("deb", self.folder / "new")
        root = self.install(self.folder / "old/apt")
        inside = ["chroot", root]
        names = ("mla-server", "mlactl", "libmla-client")

        def versions():
            return run(*inside, "dpkg-query", "-W", "-f", "${Version} ", *names).split()

        self.assertEqual(versions(), [build.version] * 3)
        self.assertIn(f"mla-server {build.version}", run(*inside, "mla-server", "--version"))
        # A file that the operator has changed survives an upgrade and a removal, not a purge.
        settings = root / "etc/mla-server/server.yaml"
        text = (build.source / "deploy/config/example.yaml").read_text(encoding="utf-8")
        text += "\n# changed by the operator\n"
        settings.write_text(text, encoding="utf-8")
        # So does what the server has written.
        kept = root / "var/lib/mla-server/checkpoints/one"
        kept.parent.mkdir(parents=True)
        kept.write_text("rows", encoding="utf-8")
        self.offer(root, self.folder / "new/apt")
        run(*inside, "apt-get", "update")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run(*inside, "apt-get", "-y", "-o", "Dpkg::Options::=--force-confold", "upgrade",
            env=environment)
        self.assertEqual(versions(), [common.version()] * 3)
        self.assertIn(f"mla-server {common.version()}", run(*inside, "mla-server", "--version"))
        run(*inside, "mla-server", "--check-config", "--config=/etc/mla-server/server.yaml", *SMALL)
        self.assertEqual(settings.read_text(encoding="utf-8"), text)
        self.assertTrue(kept.exists())
        run(*inside, "dpkg", "--remove", *names)
        self.assertTrue(settings.exists() and kept.exists())
        for binary in ("mla-server", "mlactl"):
            self.assertFalse((root / "usr/bin" / binary).exists())
        run(*inside, "dpkg", "--purge", *names)
        for path in ("etc/mla-server", "var/lib/mla-server", "usr/share/doc/mla-server"):
            self.assertFalse((root / path).exists(), path)
        self.assertEqual([path for path in root.rglob("*libmla_client*")], [])


class WheelTest(LongTest):
    def test_wheel_and_source_are_the_same_twice_and_can_be_imported(self):
        package("wheel", self.folder / "one")
        package("wheel", self.folder / "two")
        made = [{path.name: common.digest(path) for path in (self.folder / name).iterdir()}
                for name in ("one", "two")]
        self.assertEqual(made[0], made[1])
        self.assertEqual(len(made[0]), 2)
        (wheel,) = (self.folder / "one").glob("*.whl")
        target = self.folder / "installed"
        run("/usr/bin/python3", "-m", "pip", "install", "--no-index", "--no-deps", "--quiet",
            "--disable-pip-version-check", "--target", target, wheel)
        shown = run("/usr/bin/python3", "-c", "import mla_client; print(mla_client.__file__)",
                    env={**os.environ, "PYTHONPATH": str(target)}, cwd=self.folder)
        self.assertIn(str(target), shown)
        # Rings of the C library work where the machine has none of its libraries installed: all
        # but those of every system come from the package.
        native = target / "mla_client/native"
        library = native / "libmla_client.so.0"
        said = run("ldd", library)
        for line in said.splitlines():
            name, _, place = line.strip().partition(" => ")
            if place and not wheel_rules.EVERYWHERE.fullmatch(name):
                self.assertIn(str(native), place)
        self.assertIn("libprotobuf", said)
        self.assertTrue((native / "licences").is_dir())
        script = ("from mla_client import native; "
                  "print(native.why_not() or native.library().path)")
        environment = {name: value for name, value in os.environ.items()
                       if name != "MLA_CLIENT_LIBRARY"}
        self.assertEqual(run("/usr/bin/python3", "-c", script, cwd=self.folder,
                             env={**environment, "PYTHONPATH": str(target)}).strip(), str(library))


if __name__ == "__main__":
    unittest.main()
