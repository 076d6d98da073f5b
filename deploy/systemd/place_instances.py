#!/usr/bin/env python3
"""Writes what differs between the servers of a node, one for each GPU: addresses, and the cores and
the memory of the GPU's NUMA node.

    mla-place-instances --registry etcd://etcd-0:2379/fleet [--port 50551] [--root /]

For GPU N: /etc/mla-server/gpu-N.env and announce-N.env, and a drop-in of mla-server@N. The GPUs are
those of the kernel's driver for AMD (or NVIDIA) devices, in the order of their PCI addresses, which
is the order in which the runtime numbers them. Files are written again. announce-N.env is removed
where --registry is no longer given, and for GPUs that are gone. Nothing is started.
"""

import argparse
import pathlib
import socket
import sys

VENDORS = ("0x1002", "0x10de")
# A port for workers and one for operations, of each server.
PORTS = 2
MOST_GPUS = 64


def gpus(root):
    """Returns the PCI address, NUMA node (-1: unknown) and cores of each GPU."""
    found = {}
    for render in (root / "sys/class/drm").glob("renderD*"):
        device = (render / "device").resolve()
        vendor = device / "vendor"
        if not vendor.exists() or vendor.read_text().strip() not in VENDORS:
            continue
        numa = int((device / "numa_node").read_text())
        found[device.name] = (numa, (device / "local_cpulist").read_text().strip())
    return [(address, *found[address]) for address in sorted(found)][:MOST_GPUS]


def parts(cores, place, count):
    """The place-th of so many equal parts of a list of cores, as systemd takes it; of fewer cores
    than parts, all of them."""
    numbers = []
    for one in cores.split(","):
        first, _, last = one.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    size = len(numbers) // count
    mine = numbers[place * size:(place + 1) * size] if size else numbers
    return ",".join(map(str, mine))


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def announcement(root, number):
    return root / f"etc/mla-server/announce-{number}.env"


def forget(root, number):
    """Lets the server of a GPU not be announced any more."""
    announcement(root, number).unlink(missing_ok=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registry", default="",
                        help="etcd://HOST:2379/PREFIX; none: servers are not announced")
    parser.add_argument("--host", default=socket.gethostname(), help="as workers reach this host")
    parser.add_argument("--port", type=int, default=50551, help="of the first server")
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path("/"))
    args = parser.parse_args()
    found = gpus(args.root)
    for number in range(len(found), MOST_GPUS):
        forget(args.root, number)
    if not found:
        print("place_instances.py: no GPU below /sys/class/drm", file=sys.stderr)
        return 1
    for number, (address, numa, cores) in enumerate(found):
        port = args.port + PORTS * number
        etc = args.root / "etc"
        write(etc / f"mla-server/gpu-{number}.env",
              f"# GPU {number}, {address}.\n"
              f"MLA_SERVER_LISTEN=0.0.0.0:{port}\nMLA_OPS_LISTEN=127.0.0.1:{port + 1}\n")
        if args.registry:
            write(announcement(args.root, number),
                  f"REGISTRY={args.registry}\nADDRESS={args.host}:{port}\n")
        else:
            forget(args.root, number)
        same = [place for place, one in enumerate(found) if one[1] == numa and one[2] == cores]
        text = "[Service]\n"
        if cores:
            text += f"CPUAffinity={parts(cores, same.index(number), len(same))}\n"
        if numa >= 0:
            text += f"NUMAPolicy=preferred\nNUMAMask={numa}\n"
        write(etc / f"systemd/system/mla-server@{number}.service.d/place.conf", text)
        print(f"mla-server@{number}: {address}, NUMA node {numa}, port {port}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
