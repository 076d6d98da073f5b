"""The server under test: its path, and one running instance for each test module."""

import ctypes
import os
import pathlib

from mla_client import native
from mla_client.testing import ServerProcess

ROOT = pathlib.Path(__file__).resolve().parents[3]


def path():
    """SERVER_UNDER_TEST, else what `./dev test` built."""
    return os.environ.get("SERVER_UNDER_TEST", str(ROOT / ".bazel/bin/server/mla-server"))


def why_no_ucx():
    """The reason why the transport "ucx" cannot run here, or an empty string. This process and its
    children then use the C library that `./dev test` built, unless MLA_CLIENT_LIBRARY names another
    one. Call it before the first use of mla_client.native."""
    os.environ.setdefault("MLA_CLIENT_LIBRARY",
                          str(ROOT / ".bazel/bin/client/c/libmla_client.so"))
    if native.library() is None:
        return native.why_not()
    try:
        ctypes.CDLL("libucp.so.0")
    except OSError as error:
        return f"no UCX: {error}"
    return ""


def start(*arguments, listen=""):
    """A started server with small limits unless the arguments say otherwise."""
    return ServerProcess(path(), ["--kv-cache-bytes=64MiB", "--limits-max-models=512",
                                "--log-level=warning", *arguments],
                         listen=listen).start()
