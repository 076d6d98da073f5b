"""Leadership by a Lease of Kubernetes (coordination.k8s.io/v1), for fleets without etcd.

As other controllers do it: a process leads while the Lease has its name and it renews that in
time. Whether a Lease of another process has ended is judged by this process's own clock: since when
it has not changed. So clocks of hosts need not agree. A write names the version that was read, and
the API server refuses it if another process was first.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import re
import ssl
import time
import urllib.error
import urllib.request
from typing import Any, Callable, Dict, Optional, Tuple

from mla_client import errors

CALL_S = 2.0
LEASE_S = 15
MOST_REPLY_BYTES = 1 << 20
# Kubernetes puts a pod's identity there. The token is replaced from time to time.
FOLDER = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_NOT_FOUND, _CONFLICT = 404, 409


class ApiServer:
    """The API server as a pod reaches it: its address from the environment, a token and
    authorities from files."""

    def __init__(self, url: str = "", folder: pathlib.Path = FOLDER) -> None:
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not url and not host:
            raise errors.FailedPrecondition(
                "lease: this is no pod of Kubernetes: KUBERNETES_SERVICE_HOST is not set")
        self._url = url or f"https://{'[' + host + ']' if ':' in host else host}:{port}"
        self._folder = folder

    def call(self, method: str, path: str, body: Optional[Dict[str, Any]] = None
             ) -> Tuple[int, Dict[str, Any]]:
        """Returns the status and the object of a reply. Unavailable if there is none."""
        try:
            token = (self._folder / "token").read_text().strip()
            context = (ssl.create_default_context(cafile=str(self._folder / "ca.crt"))
                       if self._url.startswith("https:") else None)
            request = urllib.request.Request(
                self._url + path, None if body is None else json.dumps(body).encode(),
                {"Authorization": "Bearer " + token, "Content-Type": "application/json"},
                method=method)
            # Without proxies: the API server is in the cluster.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}),
                                                 urllib.request.HTTPSHandler(context=context))
            with opener.open(request, timeout=CALL_S) as reply:
                return reply.status, _object(reply.read(MOST_REPLY_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                return error.code, {}
        except (OSError, ValueError) as error:
            raise errors.Unavailable(f"lease: the API server did not answer: {error}") from error


def _object(text: bytes) -> Dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("the reply is no object")
    return value


class KubernetesLease:
    """Lets one process at a time lead, as quotas.Leadership does. Belongs to one thread."""

    def __init__(self, api: ApiServer, lease: str, name: str, *,
                 now: Callable[[], float] = time.monotonic) -> None:
        """`lease`: NAMESPACE/NAME; `name`: of this process, unlike all others'."""
        space, _, own = lease.partition("/")
        if not _NAME.fullmatch(space) or not _NAME.fullmatch(own):
            raise errors.InvalidArgument(
                f"lease: got {lease!r:.200}, must be NAMESPACE/NAME of Kubernetes",
                errors.ErrorDetail(field="lease"))
        self._api = api
        self._name = name
        self._space, self._own = space, own
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{space}/leases"
        self._now = now
        self._seen: Tuple[str, float] = ("", 0.0)  # a version of the Lease, and since when
        self.refused = 0  # status of the latest reply that was neither a success nor a conflict

    def held(self) -> bool:
        """Takes or keeps it. False while another process has it, or the API server is away."""
        try:
            status, lease = self._api.call("GET", f"{self._folder}/{self._own}")
            if status == _NOT_FOUND:
                return self._write("POST", self._folder, {
                    "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                    "metadata": {"name": self._own, "namespace": self._space},
                    "spec": self._spec({})})
            if status != 200:
                self.refused = status
                return False
            spec = lease.get("spec") or {}
            if spec.get("holderIdentity") != self._name and not self._has_ended(lease, spec):
                return False
            lease["spec"] = self._spec(spec)
            return self._write("PUT", f"{self._folder}/{self._own}", lease)
        except errors.Unavailable:
            return False

    def leave(self) -> None:
        """Lets another process have it."""
        try:
            status, lease = self._api.call("GET", f"{self._folder}/{self._own}")
            spec = lease.get("spec") or {}
            if status != 200 or spec.get("holderIdentity") != self._name:
                return
            lease["spec"] = {**spec, "holderIdentity": "", "leaseDurationSeconds": 1}
            self._write("PUT", f"{self._folder}/{self._own}", lease)
        except errors.Unavailable:
            pass  # it ends by itself

    def _has_ended(self, lease: Dict[str, Any], spec: Dict[str, Any]) -> bool:
        if not spec.get("holderIdentity"):
            return True
        version = str((lease.get("metadata") or {}).get("resourceVersion", ""))
        if self._seen[0] != version:
            self._seen = (version, self._now())
        seconds = spec.get("leaseDurationSeconds")
        length = seconds if isinstance(seconds, int) and seconds > 0 else LEASE_S
        return self._now() - self._seen[1] > length

    def _spec(self, before: Dict[str, Any]) -> Dict[str, Any]:
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        ours = before.get("holderIdentity") == self._name
        moves = before.get("leaseTransitions")
        return {"holderIdentity": self._name, "leaseDurationSeconds": LEASE_S, "renewTime": now,
                "acquireTime": before.get("acquireTime", now) if ours else now,
                "leaseTransitions": (moves if isinstance(moves, int) else 0)
                                    + (0 if ours or not before else 1)}

    def _write(self, method: str, path: str, lease: Dict[str, Any]) -> bool:
        status, _ = self._api.call(method, path, lease)
        if status in (200, 201):
            return True
        if status != _CONFLICT:
            self.refused = status
        return False
