"""The programs of two versions that work together in tests: the last release, and this tree."""

import os
import pathlib
import subprocess

import release

LONG = os.environ.get("MLA_TEST_LONG", "") != ""
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / \
    "mla-server/compiled"


class Side:
    """The programs of one version: a server, mlactl, a Python client."""

    def __init__(self, name, server, mlactl, python):
        self.name, self.server, self.mlactl, self.python = name, server, mlactl, python

    def command(self, target, *words):
        """Runs mlactl; returns its status and what it printed."""
        done = subprocess.run([str(self.mlactl), f"--target={target}", *words], text=True,
                              check=False, capture_output=True, stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout + done.stderr


def tree():
    """This tree's programs, as ./dev test has built them."""
    folder = pathlib.Path(os.environ.get("BINARIES_UNDER_TEST", release.ROOT / ".bazel/bin"))
    return Side("tree", folder / "server/mla-server", folder / "client/mlactl/mlactl",
                release.ROOT / "client/python")


def last_release():
    """The last release's programs, built from its commit, which takes long the first time."""
    build = release.Build(release.releases()[0])
    build.make(CACHE)
    return Side(build.version, build.server, build.mlactl, build.source / "client/python")


def sides():
    """The older and the newer one. In the quick run both are this tree."""
    return last_release() if LONG else tree(), tree()
