"""Servers of this host: found by their sockets, whatever the registry knows of them.

The name service and lists have addresses only, and with TLS a path in a registry is not enough to
trust a socket. So the caller names the sockets of this host, and a server is reached by the one
that answers with its boot id.
"""

from __future__ import annotations

import glob
import os
import threading
from typing import Callable, Dict, List, Tuple

from mla_client import errors

# Sockets of one host that are looked at.
MOST_SOCKETS = 64

_File = Tuple[str, int, int]  # path, device and inode: another file is another server's


class SameHost:
    """Thread-safe."""

    def __init__(self, pattern: str, boot_id_of: Callable[[str], int]) -> None:
        """`pattern`: paths of the sockets, with `*`; `boot_id_of` asks the server at a path."""
        self._pattern = pattern
        self._boot_id_of = boot_id_of
        self._lock = threading.Lock()
        self._known: Dict[_File, int] = {}  # boot ids

    def path_of(self, boot_id: int) -> str:
        """The socket of that server; "" if it has none on this host."""
        files = self._files()
        with self._lock:
            self._known = {file: self._known[file] for file in files if file in self._known}
            known = dict(self._known)
        # The one that had this boot id is asked first, then new files, then those of others.
        for file in sorted(files, key=lambda one: (known.get(one) != boot_id, one in known)):
            try:
                file_boot_id = self._boot_id_of(file[0])
            except errors.MlaError:
                continue  # whatever listens there, if anything does
            with self._lock:
                self._known[file] = file_boot_id
            if file_boot_id == boot_id:
                return file[0]
        return ""

    def _files(self) -> List[_File]:
        files: List[_File] = []
        for path in sorted(glob.glob(self._pattern)):
            try:
                about = os.stat(path)
            except OSError:
                continue  # it has gone
            files.append((path, about.st_dev, about.st_ino))
        return files[:MOST_SOCKETS]
