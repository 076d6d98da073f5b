"""Two servers of one host, a worker of each, and a worker that uses both; two_servers.cc has the
ways that are compared.

    two_servers_benchmark [--backend cpu|cuda|hip] [--server PROGRAM] [--worker PROGRAM]
                          [--logs FOLDER] [--server-flags FLAGS] [ARG of the worker...]

Starts a server for each of the first two GPUs, or two on the CPU backend, with a unix socket each
in a folder of their own, and runs the worker. Needs nothing but Python's own library, so that it
can be carried to a machine with GPUs:

    bazel build --config=hip //server:mla-server //tests/bench/fleet:two_servers_worker
    two_servers.py --backend cuda --server mla-server --worker two_servers_worker

On the CPU backend the shapes are small, for the processors are shared: the figures of two servers
say nothing of two GPUs there. Exits with the worker's status.
"""

import argparse
import pathlib
import shlex
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
SERVER = ROOT / ".bazel/bin/server/mla-server"
WORKER = ROOT / ".bazel/bin/tests/bench/fleet/two_servers_worker"
SERVERS = 2
START_S = 120
FLAGS = {
    "cpu": ["--backend-threads=1", "--kv-cache-bytes=256MiB", "--limits-weights-bytes=64MiB",
            "--shm-region-bytes=128MiB", "--shm-total-bytes=512MiB"],
    "gpu": ["--kv-cache-bytes=96GiB", "--limits-weights-bytes=4GiB", "--shm-region-bytes=1GiB",
            "--shm-total-bytes=4GiB", "--tenants-region-bytes=4GiB"],
}
SMALL = ["--layers", "4", "--heads", "4", "--context", "512", "--batch", "4", "--seconds", "2",
         "--copy-threads", "1"]


def start(args, number, folder, log):
    """A server of a GPU, and the path of its socket."""
    path = f"{folder}/{number}/mla.sock"
    pathlib.Path(path).parent.mkdir(mode=0o700)
    device = [] if args.backend == "cpu" else [f"--gpu-device={number}"]
    flags = FLAGS["cpu" if args.backend == "cpu" else "gpu"]
    server = subprocess.Popen(  # pylint: disable=consider-using-with
        [args.server, f"--unix-path={path}", "--listen=", "--ops-listen=",
         f"--backend={args.backend}", *device, *flags, *shlex.split(args.server_flags)],
        stdout=log, stderr=log)
    return server, path


def await_socket(server, path, log):
    """Returns once the server takes connections."""
    deadline = time.monotonic() + START_S
    while True:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
                return
            except OSError:
                pass
        if server.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()
            raise RuntimeError("a server did not start: " + "\n".join(lines[-5:]))
        time.sleep(0.1)


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--server", default=str(SERVER))
    parser.add_argument("--worker", default=str(WORKER))
    parser.add_argument("--logs")
    parser.add_argument("--server-flags", default="")
    args, rest = parser.parse_known_args()
    # The flag's two forms, as ./dev bench gives it.
    rest = [part for one in rest for part in one.split("=", 1)]
    servers = []
    with tempfile.TemporaryDirectory() as folder:
        logs = pathlib.Path(args.logs or folder)
        try:
            for number in range(SERVERS):
                path = logs / f"server_{number}.log"
                log = open(path, "w+b")  # pylint: disable=consider-using-with
                servers.append((*start(args, number, folder, log), log))
            for one in servers:
                await_socket(*one)
            targets = ",".join(f"unix:{path}" for _, path, _ in servers)
            small = SMALL if args.backend == "cpu" else []
            return subprocess.run([args.worker, "--targets", targets, *small, *rest],
                                  check=False).returncode
        finally:
            for server, _, log in servers:
                server.kill()
                server.wait()
                log.close()


if __name__ == "__main__":
    sys.exit(main())
