"""The server under test: its path, and one running instance for each test module."""

import os
import pathlib

from mla_client.testing import ServerProcess

ROOT = pathlib.Path(__file__).resolve().parents[3]


def path():
    """SERVER_UNDER_TEST, else what `./dev test` built."""
    return os.environ.get("SERVER_UNDER_TEST", str(ROOT / ".bazel/bin/server/mla-server"))


def start(*arguments, listen=""):
    """A started server with small limits unless the arguments say otherwise."""
    return ServerProcess(path(), ["--kv-cache-bytes=64MiB", "--limits-max-models=512",
                                "--log-level=warning", *arguments],
                         listen=listen).start()
