"""Starts an mla-server binary as a child process; for tests, demos and notebooks."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from typing import Any, List, Optional, Sequence

from mla_client import errors
from mla_client.client import Client

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0


class ServerProcess:
    """A server on a unix socket in a folder of its own; stopped at the end of a `with` block."""

    def __init__(self, binary: str, arguments: Sequence[str] = (), *, listen: str = "") -> None:
        """`listen` is a TCP address in addition to the unix socket; empty: no TCP."""
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="mla-"))
        self.socket = self._folder / "mla.sock"
        self.log_path = self._folder / "server.log"
        self.target = f"unix:{self.socket}"
        self.command: List[str] = [str(pathlib.Path(binary).resolve()),
                                   f"--unix-path={self.socket}", f"--listen={listen}",
                                   "--ops-listen=", *arguments]
        self._process: Optional[subprocess.Popen] = None

    @property
    def pid(self) -> int:
        """Returns the process id of the running server."""
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> "ServerProcess":
        """Starts the server and waits until it answers. RuntimeError with its log if it does not
        answer.
        """
        # The server takes MLA_* of the environment as configuration; ours is on the command line.
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith("MLA_")}
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log,
                                             stderr=subprocess.STDOUT, env=environment)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with Client.connect(self.target, timeout_s=5.0):
                    return self
            except errors.MlaError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log_text = self.log()
                    self.stop()
                    raise RuntimeError(f"server did not come up: {error}\n{log_text}") from error
            time.sleep(0.05)

    def kill(self) -> None:
        """Ends the server at once, as a crash does. It may be started again, with the same target.
        """
        assert self._process is not None, "not started"
        self._process.kill()
        self._process.wait()
        self._process = None

    def wait(self, timeout_s: float) -> int:
        """Waits until the server has ended by itself, as after a drain; returns its exit status."""
        assert self._process is not None, "not started"
        return self._process.wait(timeout_s)

    def stop(self) -> int:
        """Asks the server to drain and end; returns its exit status. Killed if it takes too long.
        """
        status = 0
        if self._process is not None:
            self._process.terminate()
            try:
                status = self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                status = self._process.wait()
            self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)
        return status

    def log(self) -> str:
        """Returns the server's log up to now."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def __enter__(self) -> "ServerProcess":
        return self.start()

    def __exit__(self, *exc_info: Any) -> None:
        self.stop()
