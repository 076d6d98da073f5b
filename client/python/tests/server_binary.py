"""The server under test: its path, and one running instance for each test module."""

import os
import pathlib

from mla_client.testing import ServerProcess

ROOT = pathlib.Path(__file__).resolve().parents[3]


def path():
    """SERVER_UNDER_TEST, else what `./dev test` built."""
    return os.environ.get("SERVER_UNDER_TEST", str(ROOT / ".bazel/bin/server/mla-server"))


def use_client_library():
    """Has this process and its children use the C library that `./dev test` built, unless
    MLA_CLIENT_LIBRARY names another one. Call it before the first use of mla_client.native."""
    os.environ.setdefault("MLA_CLIENT_LIBRARY",
                          str(ROOT / ".bazel/bin/client/c/libmla_client.so"))


def start(*arguments, listen=""):
    """A started server with small limits unless the arguments say otherwise."""
    return ServerProcess(path(), ["--kv-cache-bytes=64MiB", "--limits-max-models=512",
                                "--log-level=warning", *arguments],
                         listen=listen).start()
