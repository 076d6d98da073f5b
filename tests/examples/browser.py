"""A headless Chromium, driven over its debugging pipe."""

import base64
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time

BROWSER = "chromium-headless-shell"
TIMEOUT_S = 60.0


class Browser:
    """One page. Use it in a `with` block."""

    def __init__(self, width=1100, height=800):
        self._folder = tempfile.mkdtemp(prefix="mla-browser-")
        read_end, self._write = os.pipe()   # the browser reads descriptor 3
        self._read, write_end = os.pipe()   # and writes descriptor 4
        # A shell assigns these descriptors, whatever numbers they have here.
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec 3<&{read_end} 4>&{write_end}; exec \"$0\" \"$@\"", BROWSER,
             "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
             f"--window-size={width},{height}", f"--user-data-dir={self._folder}"],
            pass_fds=(read_end, write_end), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        os.close(read_end)
        os.close(write_end)
        self._kept, self._number, self._session = b"", 0, None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target,
                                   flatten=True)["sessionId"]

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._process.terminate()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, url):
        """Shows a page; waits until it is loaded."""
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression):
        """Returns the value of a JavaScript expression in the page."""
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"])
        return result["result"].get("value")

    def wait(self, expression):
        """Waits until an expression is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.value(expression):
            if time.monotonic() > deadline:
                raise AssertionError(f"not true in time: {expression}")
            time.sleep(0.02)

    def shoot(self, path):
        """Writes a screenshot."""
        data = self._call("Page.captureScreenshot")["data"]
        pathlib.Path(path).write_bytes(base64.b64decode(data))

    def _call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            reply = self._next(deadline)
            if reply.get("id") == self._number:
                if "error" in reply:
                    raise AssertionError(f"{method}: {reply['error']}")
                return reply["result"]

    def _next(self, deadline):
        """Returns the browser's next message, which may be an event."""
        while b"\0" not in self._kept:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            data = os.read(self._read, 1 << 16) if ready else b""
            if not data:
                raise AssertionError("the browser does not answer")
            self._kept += data
        message, _, self._kept = self._kept.partition(b"\0")
        return json.loads(message)
