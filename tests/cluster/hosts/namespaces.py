"""Hosts on one machine: network namespaces that are plugged into a switch, which has one, too.

Needs root, `ip` and `iptables`. Nothing outside of these namespaces changes, and what they have
ends with them.
"""

import ctypes
import os
import subprocess

NETWORK = "10.77"
NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def _run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def why_not():
    """Why this machine cannot have such hosts; "": it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"mla-{os.getpid()}-try"
    try:
        _run("ip", "netns", "add", name)
        try:
            _run("ip", "netns", "exec", name, "iptables", "-A", "INPUT", "-j", "DROP")
        finally:
            _run("ip", "netns", "delete", name)
    except (RuntimeError, OSError) as error:
        return f"no network namespaces here: {error}"
    return ""


class Host:
    """One host; made by Switch.host."""

    def __init__(self, switch, number):
        self._switch = switch
        self._plug = f"host{number}"
        self.namespace = f"{switch.name}-{number}"
        self.address = f"{NETWORK}.{number // 250}.{number % 250 + 2}"
        _run("ip", "netns", "add", self.namespace)
        _run("ip", "-n", switch.namespace, "link", "add", self._plug, "type", "veth", "peer",
             "name", "eth0", "netns", self.namespace)
        _run("ip", "-n", switch.namespace, "link", "set", self._plug, "master", "switch", "up")
        _run("ip", "-n", self.namespace, "link", "set", "lo", "up")
        _run("ip", "-n", self.namespace, "address", "add", f"{self.address}/16", "dev", "eth0")
        _run("ip", "-n", self.namespace, "link", "set", "eth0", "up")

    @property
    def prefix(self):
        """What comes before a command that runs on this host."""
        return ["ip", "netns", "exec", self.namespace]

    def cut(self, other, is_cut=True):
        """Drops all packets between this host and another one, silently; or lets them pass."""
        for chain, which in (("INPUT", "-s"), ("OUTPUT", "-d")):
            _run(*self.prefix, "iptables", "-w", "-A" if is_cut else "-D", chain, which,
                 other.address, "-j", "DROP")

    def unplug(self, is_out=True):
        """Takes the host's link down, at the switch; or up again."""
        _run("ip", "-n", self._switch.namespace, "link", "set", self._plug,
             "down" if is_out else "up")


class Switch:
    """Use it in a `with` block."""

    def __init__(self):
        self.name = f"mla-{os.getpid()}"
        self.namespace = f"{self.name}-switch"
        self.hosts = []

    def __enter__(self):
        _run("ip", "netns", "add", self.namespace)
        try:
            for command in (("link", "add", "switch", "type", "bridge"),
                            ("address", "add", f"{NETWORK}.255.1/16", "dev", "switch"),
                            ("link", "set", "lo", "up"), ("link", "set", "switch", "up")):
                _run("ip", "-n", self.namespace, *command)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info):
        for namespace in (*(host.namespace for host in self.hosts), self.namespace):
            subprocess.run(["ip", "netns", "delete", namespace], check=False,
                           stderr=subprocess.DEVNULL)

    def host(self):
        """Another host."""
        self.hosts.append(Host(self, len(self.hosts)))
        return self.hosts[-1]

    def enter(self):
        """Moves the calling thread to the switch, from where all hosts can be reached. Threads that
        it starts later are there, too."""
        with open(f"/run/netns/{self.namespace}", "rb") as file:
            library = ctypes.CDLL(None, use_errno=True)
            if library.setns(file.fileno(), NEW_NETWORK) != 0:
                raise OSError(ctypes.get_errno(), f"setns {self.namespace}")
