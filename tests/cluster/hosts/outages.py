"""Outages of the network between a client and a server on hosts of their own: packets vanish, and a
client that goes on calling is back some time after their end.

    outages.py [--lengths 1.7,5,13] [--runs 10] [--library libmla_client.so.0]

Prints a line of JSON a length: the times in seconds from the end of each outage to the end of the
first call that has an answer, and the calls that failed. Nothing is judged by the clock: exits 1 if
a client is not back while it waits. `--library`: the client is that of C, in this file, not that
of Python. Needs root; exits 77 on a machine without network namespaces.
"""

import argparse
import ctypes
import json
import pathlib
import random
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[2] / "client" / "python")]

# pylint: disable=wrong-import-position
import namespaces
import real
from mla_client import Client, Geometry, ModelSpec, errors
from mla_client.testing import ServerProcess

SKIPPED = 77
PORT = 50551
PAUSE_S = 0.05    # between two calls
LEASE_MS = 600_000
MOST_WAIT_S = 120.0
OK, NOT_FOUND = 0, 5  # mla_code


def python_calls(target):
    """Yields whether each call of the Python client had an answer."""
    with Client.connect(target, timeout_s=60, transport="inline") as client:
        model = client.register_model(ModelSpec("kept", Geometry(2, 32, 16), 1, 0.1))
        sequence = model.open_sequence(lease_ms=LEASE_MS)
        while True:
            try:
                sequence.refresh()
                yield True
            except errors.MlaError:
                yield False


def c_calls(target, path):
    """Yields whether each call of the C client had an answer. The call removes a model that is not
    there, which the server refuses at once."""
    library = ctypes.CDLL(path)
    library.mla_connect.argtypes = [ctypes.c_char_p, ctypes.c_void_p,
                                    ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p]
    library.mla_unregister_model.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    client = ctypes.c_void_p()
    if library.mla_connect(target.encode(), None, ctypes.byref(client), None) != OK:
        raise RuntimeError("no server answers")
    while True:
        yield library.mla_unregister_model(client, b"none", None) in (OK, NOT_FOUND)


def call(target, library):
    """The client: a line a call with its begin, its end, and whether it had an answer."""
    calls = c_calls(target, library) if library else python_calls(target)
    while True:
        begin = time.monotonic()
        good = next(calls)
        print(json.dumps([begin, time.monotonic(), good]), flush=True)
        time.sleep(PAUSE_S)


class Calls:
    """The calls of a client on a host, as they end."""

    def __init__(self, host, target, library):
        self._process = subprocess.Popen(
            [*host.prefix, sys.executable, __file__, "--call", target, "--library", library],
            stdout=subprocess.PIPE, text=True)
        self._changed = threading.Condition()
        self.calls = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self._process.stdout:
            with self._changed:
                self.calls.append(json.loads(line))
                self._changed.notify_all()

    def good_after(self, when):
        """The end of the first call with an answer that ends after `when`."""
        def found():
            return next((end for _, end, good in self.calls if good and end > when), None)
        with self._changed:
            if not self._changed.wait_for(lambda: found() is not None, MOST_WAIT_S):
                raise RuntimeError("the client is not back")
            return found()

    def close(self):
        """Ends the client."""
        self._process.kill()
        self._process.wait()


def run(lengths, runs, library):
    """Prints what each length gives."""
    with namespaces.Switch() as switch:
        near, far = switch.host(), switch.host()
        server = ServerProcess(real.BINARY, ["--kv-cache-bytes=16MiB", "--log-level=warning",
                                             "--insecure"],
                               listen=f"{far.address}:{PORT}")
        server.command[:0] = far.prefix
        server.start()
        calls = Calls(near, f"{far.address}:{PORT}", library)
        try:
            calls.good_after(0)
            for length in lengths:
                back, before = [], len(calls.calls)
                for _ in range(runs):
                    time.sleep(random.uniform(1, 2))
                    near.cut(far)
                    time.sleep(length)
                    near.cut(far, is_cut=False)
                    end = time.monotonic()
                    back.append(round(calls.good_after(end) - end, 2))
                failed = sum(not good for _, _, good in calls.calls[before:])
                print(json.dumps({"outage_s": length, "back_s": back, "longest_s": max(back),
                                  "failed_calls": failed}), flush=True)
        finally:
            calls.close()
            server.stop()


def main():
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1.7,5,13")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--library", default="", help="the C client's; empty: the Python client")
    parser.add_argument("--call", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.call:
        return call(args.call, args.library)
    why = namespaces.why_not()
    if why:
        print(why)
        return SKIPPED
    run([float(length) for length in args.lengths.split(",")], args.runs,
        args.library)
    return 0


if __name__ == "__main__":
    sys.exit(main())
