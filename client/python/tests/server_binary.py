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
    return ServerProcess(path(), ["--kv-cache-bytes=64MiB", "--limits-max-models=1024",
                                "--log-level=warning", *arguments],
                         listen=listen).start()


ANY_PORT = "127.0.0.1:0"


def start_on_tcp(*arguments):
    """A started server that also listens to a free TCP port, and its address there. The server
    chooses the port, so no other process can take it first; a restart listens to the same one."""
    server = start(*arguments, "--log-level=info", listen=ANY_PORT)
    address = f"127.0.0.1:{server.log().split('tcp_port=')[1].split()[0]}"
    server.command[server.command.index(f"--listen={ANY_PORT}")] = f"--listen={address}"
    return server, address
