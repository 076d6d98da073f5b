"""A fleet whose processes are on hosts of their own: three nodes of etcd, servers with an announcer
each, and workers. It has the methods of real.Fleet."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import etcd
import peers
import real
from mla_client import Client, Tls, errors
from mla_client.cluster import registry, targets
from mla_client.cluster.operations.drain import drain
from mla_client.testing import ServerProcess

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
NODES = 3
PORT, PORT_AFTER_RELAY = 50551, 50552
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "client/python")}
END_S = 300.0


class EtcdNodes:
    """A registry of three nodes. `kill` ends all of them, `start` begins them again."""

    def __init__(self, switch):
        self.hosts = [switch.host() for _ in range(NODES)]
        self._folder = tempfile.mkdtemp(prefix="mla-etcd-")
        self._processes = []
        self.target = "etcd://" + ",".join(f"{host.address}:2379" for host in self.hosts) + "/fleet"

    def start(self):
        """Returns once they answer."""
        peers = ",".join(f"node{number}=http://{host.address}:2380"
                         for number, host in enumerate(self.hosts))
        for number, host in enumerate(self.hosts):
            client, peer = (f"http://{host.address}:{port}" for port in (2379, 2380))
            with open(pathlib.Path(self._folder, f"log{number}"), "ab") as log:
                self._processes.append(subprocess.Popen(
                    [*host.prefix, etcd.program(), f"--name=node{number}",
                     f"--data-dir={self._folder}/data{number}", f"--listen-client-urls={client}",
                     f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}",
                     f"--initial-advertise-peer-urls={peer}", f"--initial-cluster={peers}"],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT))
        found, deadline = self.registry(), time.monotonic() + etcd.START_S
        while True:
            try:
                found.read()
                found.close()
                return
            except errors.Unavailable:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def registry(self, timeout_s=5.0):
        """A client of it."""
        return registry.EtcdRegistry(targets.etcd_target(self.target), timeout_s=timeout_s)

    def kill(self):
        """All nodes, as kill -9."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes.clear()

    def unplug(self, is_out=True):
        """No host reaches any of them; or all do again."""
        for host in self.hosts:
            host.unplug(is_out)

    def close(self):
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


class Fleet:
    """Use it in a `with` block, in a process that has entered the switch."""

    def __init__(self, switch, servers):
        self._switch = switch
        self.etcd = EtcdNodes(switch)
        self.lock = threading.Lock()
        self.servers, self.hosts = {}, {}  # by address
        self._others = []  # announcers and the relay
        self._authority = peers.Authority()
        self.relay, self.relayed = None, ""
        for number in range(servers):
            host = switch.host()
            address = f"{host.address}:{PORT}"
            listen = address if number > 0 else f"127.0.0.1:{PORT_AFTER_RELAY}"
            files = self._authority.files("server")
            server = ServerProcess(real.BINARY, [
                "--kv-cache-bytes=16MiB", "--log-level=warning", peers.OPERATORS,
                f"--tls-cert={files['cert']}", f"--tls-key={files['key']}",
                f"--client-ca={files['ca']}"], listen=listen)
            server.command[:0] = host.prefix
            self.servers[address], self.hosts[address] = server, host
            self.relayed = self.relayed or address
        self._authority.make("server", ",".join(
            ["DNS:localhost", *(f"IP:{host.address}" for host in self.hosts.values())]))
        for name in ("red", "blue"):
            self._authority.make(name)

    def files(self, name):
        """Fields of Tls: those of the workers' tenant, red, or of the operator, blue."""
        return self._authority.files(name)

    def __enter__(self):
        try:
            self.etcd.start()
            for server in self.servers.values():
                server.start()
            host = self.hosts[self.relayed]
            self.relay = self._start([*host.prefix, sys.executable, str(HERE / "relay.py"),
                                      host.address, str(PORT), str(PORT_AFTER_RELAY)],
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            if self.relay.stdout.readline() != "ready\n":
                raise RuntimeError("the relay does not listen")
            for address, server in self.servers.items():
                self._start([*self.hosts[address].prefix, sys.executable, "-m",
                             "mla_client.cluster", "announce", "--registry", self.etcd.target,
                             "--target", server.target, "--address", address],
                            env=ENVIRONMENT, stderr=subprocess.DEVNULL)
            self.wait_for(len(self.servers))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info):
        for process in self._others:
            process.kill()
            process.wait()
        for server in self.servers.values():
            try:
                server.kill()
            except AssertionError:
                pass  # it was killed, or never started
            server.stop()
        self.etcd.close()
        self._authority.close()

    def wait_for(self, count):
        """Until so many are members."""
        registry_, deadline = self.etcd.registry(), time.monotonic() + real.START_S
        while len(registry_.read()) < count:
            if time.monotonic() > deadline:
                raise AssertionError(f"{len(registry_.read())} of {count} servers are announced")
            time.sleep(0.05)
        registry_.close()

    def kill(self, address):
        """As kill -9."""
        self.servers[address].kill()

    def restart(self, address):
        """Another process with the same address."""
        self.servers[address].start()

    def delay(self, seconds):
        """Of all that passes between the first server and others."""
        self.relay.stdin.write(f"{seconds}\n")
        self.relay.stdin.flush()

    def connect(self, name, **options):
        """The client of a worker at the switch. All servers are reached over the network."""
        return Client.connect(self.etcd.target, client_id=name, timeout_s=real.TIMEOUT_S,
                              tls=Tls(**self.files("red")),
                              cluster={"subset": 0, **options, "same_host": False})

    def upgrade(self, address):
        """Hands a server's sequences to the others, as an operator does, and starts another process
        in its place; returns how many sequences have stayed."""
        found = self.etcd.registry()
        left = drain(found, lambda peer: Client.connect(
            peer, tls=Tls(**self.files("blue")), timeout_s=END_S, transport="inline"), address)
        found.close()
        server = self.servers[address]
        os.kill(server.pid, signal.SIGTERM)
        server.wait(END_S)
        server.start()
        self.wait_for(len(self.servers))
        return left

    def _start(self, command, **how):
        self._others.append(subprocess.Popen(command, **how))
        return self._others[-1]


class Workers:
    """Workers on some hosts. `turns` counts the turns of all."""

    def __init__(self, fleet, switch, hosts, workers, keep_s):
        self.hosts = [switch.host() for _ in range(hosts)]
        self.turns = 0
        self._lock = threading.Lock()
        self._said = []
        self._processes = [subprocess.Popen(
            [*host.prefix, sys.executable, str(HERE / "worker.py"), fleet.etcd.target,
             f"host-{number}", str(workers // hosts), str(number + 1), str(keep_s),
             json.dumps(fleet.files("red"))],
            env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for number, host in enumerate(self.hosts)]
        self._readers = [threading.Thread(target=self._read, args=(process,))
                         for process in self._processes]
        for reader in self._readers:
            reader.start()

    def _read(self, process):
        for line in process.stdout:
            with self._lock:
                if line == "turn\n":
                    self.turns += 1
                else:
                    self._said.append(json.loads(line))

    @property
    def alive(self):
        return all(process.poll() is None for process in self._processes)

    def finish(self):
        """Ends them; returns what was wrong, and counts."""
        for process in self._processes:
            process.stdin.write("end\n")
            process.stdin.flush()
        wrong, counts = [], {"turns": self.turns}
        for process, reader in zip(self._processes, self._readers):
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                wrong.append("workers do not end")
                process.kill()
            reader.join()
        if len(self._said) != len(self._processes):
            wrong.append(f"{len(self._said)} of {len(self._processes)} hosts have said what was")
        for one in self._said:
            wrong += one["wrong"]
            for name, count in one["counts"].items():
                counts[name] = counts.get(name, 0) + count
        return wrong, counts

    def close(self):
        for process in self._processes:
            process.kill()
            process.wait()
