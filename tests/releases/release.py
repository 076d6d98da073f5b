"""Releases as deploy/releases.yaml lists them, and how one is built again from its commit."""

import pathlib
import shutil
import subprocess
import tarfile

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/releases"


def releases():
    """All of them, the newest first."""
    text = (ROOT / "deploy/releases.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["releases"]


def git(*words):
    """Returns git's output, or None if git fails, for example without a repository."""
    done = subprocess.run(["git", *words], cwd=ROOT, check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


class Build:
    """A release, built below build/releases and kept there for the next use."""

    def __init__(self, release):
        self.version = release["version"]
        self.source = FOLDER / release["version"] / "source"
        self._commit = release["commit"]

    @property
    def server(self):
        return self.source / ".bazel/bin/server/mla-server"

    @property
    def mlactl(self):
        return self.source / ".bazel/bin/client/mlactl/mlactl"

    def make(self, cache, *targets):
        """Builds server and mlactl, `targets`, and the stubs of its Python client. `cache`: of
        compiled outputs, shared with the tree."""
        if not (self.source / "dev").exists():
            shutil.rmtree(self.source, ignore_errors=True)
            self.source.mkdir(parents=True)
            with subprocess.Popen(["git", "archive", self._commit], cwd=ROOT,
                                  stdout=subprocess.PIPE) as archive, \
                    tarfile.open(fileobj=archive.stdout, mode="r|") as tar:
                tar.extractall(self.source)
        subprocess.run(["bazel", "build", f"--disk_cache={cache}", "--config=opt",
                        "//server:mla-server", "//client/mlactl:mlactl", *targets],
                       cwd=self.source, check=True, stdin=subprocess.DEVNULL)
        subprocess.run(["/usr/bin/python3", "client/python/generate_stubs.py", "--quiet"],
                       cwd=self.source, check=True)
        # Another server of Bazel would stay for hours.
        subprocess.run(["bazel", "shutdown"], cwd=self.source, check=False)
