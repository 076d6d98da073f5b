"""The Helm chart, rendered by Go's text/template and sprig, as Helm does it: see render/main.go.

No Helm and no API server has seen the chart in these tests."""

import copy
import functools
import json
import os
import pathlib
import re
import subprocess

import jsonschema
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/helm/mla-server"

# Together these values reach every branch of the templates.
SCENARIOS = {
    "defaults": {},
    "everything": {
        "fullnameOverride": "attention", "replicas": 3,
        "image": {"repository": "example.org/mla", "tag": "1", "pullSecrets": [{"name": "pull"}]},
        "config": {"server": {"operators": "ops", "drain_deadline_ms": 90500},
                   "backend": {"deterministic": True, "threads": 8},
                   "limits": {"weights_bytes": 1073741824}},
        "sameHost": {"hostPath": "/run/mla-server"},
        "checkpoints": {"enabled": True, "size": "1Ti", "storageClass": "fast"},
        "gpu": {"enabled": True, "supplementalGroups": [109, 44], "runtimeHostPath": "/opt/rocm"},
        "service": {"bindAddress": "[::]", "ipFamilyPolicy": "PreferDualStack"},
        "certificate": {"enabled": True, "issuerRef": {"name": "ca", "kind": "ClusterIssuer"}},
        "extraVolumes": [{"name": "nvme", "hostPath": {"path": "/mnt/nvme", "type": "Directory"}}],
        "extraVolumeMounts": [{"name": "nvme", "mountPath": "/tiers"}],
        "extraEnv": [{"name": "MLA_OPS_CONNECTIONS", "value": "9"}],
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"},
                           "documents": "https://docs.example/"},
        "dashboard": {"enabled": True},
        "podAnnotations": {"note": "x"}, "podLabels": {"team": "x"}, "nodeSelector": {"gpu": "x"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
                                       "whenUnsatisfiable": "ScheduleAnyway"}],
        "priorityClassName": "high"},
    "UCX over RDMA": {
        "rdma": {"enabled": True, "resource": "rdma/hca_shared_devices_a", "hugepages": "512Mi",
                 "ipcLock": True, "hostNetwork": True,
                 "clients": [{"podSelector": {"matchLabels": {"app": "worker"}}}]},
        "config": {"ucx": {"devices": "mlx5_0:1", "transports": "rc,ud"}}},
    "UCX over TCP": {"rdma": {"enabled": True}, "config": {"ucx": {"transports": "tcp"}}},
    "GPU with its runtime in the image, CPU if there is none": {
        "gpu": {"enabled": True, "backend": ""}},
    "no TLS": {"tls": {"enabled": False}, "insecure": True,
               "serviceAccount": {"create": False}, "networkPolicy": {"clients": []}},
    "unix socket only": {"tls": {"enabled": False}, "sameHost": {"hostPath": "/run/mla-server"},
                         "podDisruptionBudget": {"enabled": False}, "logFormat": "text"},
}


class TemplateError(Exception):
    """Raised by `fail`, `required` and missing keys of a template."""


@functools.lru_cache(maxsize=None)
def renderer():
    """The program that renders, built from Debian's packages unless it is there."""
    source = pathlib.Path(__file__).with_name("render") / "main.go"
    program = ROOT / "build/tools/render"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        program.parent.mkdir(parents=True, exist_ok=True)
        fresh = program.with_suffix(f".{os.getpid()}")  # other tests may build it as well
        subprocess.run(["go", "build", "-o", fresh, source], check=True, cwd=source.parent,
                       env={**os.environ, "GO111MODULE": "off", "GOPATH": "/usr/share/gocode",
                            "GOCACHE": str(program.parent / "gocache"), "GOFLAGS": ""})
        fresh.rename(program)
    return program


def render(root, files, templates):
    """{name: text} of the templates. TemplateError if one fails."""
    done = subprocess.run([renderer()], check=True, capture_output=True, text=True,
                          input=json.dumps({"root": root, "files": files,
                                            "templates": templates}))
    texts = json.loads(done.stdout)
    if "error" in texts:
        raise TemplateError(texts["error"])
    return texts


def values_read():
    """The paths below .Values that the templates read."""
    text = "".join(path.read_text(encoding="utf-8") for path in (FOLDER / "templates").iterdir())
    return set(re.findall(r"\.Values\.([A-Za-z][\w.]*)", text))


def load(name):
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def schema():
    return json.loads((FOLDER / "values.schema.json").read_text(encoding="utf-8"))


def merged(values, over):
    """Returns `values` with `over` merged into them as Helm does it: mappings are merged,
    everything else is replaced."""
    result = copy.deepcopy(values)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


class Rendered:
    """The chart with values laid over its defaults: `objects` by (kind, name), and `notes`."""

    def __init__(self, over, release="demo"):
        values = merged(load("values.yaml"), over)
        jsonschema.validate(values, schema())
        about = load("Chart.yaml")
        root = {"Values": values,
                "Chart": {"Name": about["name"], "Version": about["version"],
                          "AppVersion": about["appVersion"]},
                "Release": {"Name": release, "Namespace": "inference", "Service": "Helm"}}
        files = {str(path.relative_to(FOLDER)): path.read_text(encoding="utf-8")
                 for path in (FOLDER / "files").iterdir()}
        texts = render(root, files, {path.name: path.read_text(encoding="utf-8")
                                     for path in sorted((FOLDER / "templates").iterdir())})
        self.values = values
        self.notes = texts.pop("NOTES.txt")
        self.objects = {}
        for text in texts.values():
            for item in filter(None, yaml.safe_load_all(text)):
                key = item["kind"], item["metadata"]["name"]
                if key in self.objects:
                    raise ValueError(f"two objects {key}")
                self.objects[key] = item

    def one(self, kind):
        """The only object of a kind. The dashboard and the service of members are ignored."""
        found, = [item for (its_kind, name), item in self.objects.items()
                  if its_kind == kind and not name.endswith(("-dashboard", "-members"))]
        return found

    def pod(self):
        return self.one("StatefulSet")["spec"]["template"]["spec"]

    def container(self):
        only, = self.pod()["containers"]
        return only

    def environment(self):
        """{name: value} of the container, as a pod called demo-0 sees it."""
        return {item["name"]: item["value"].replace("$(POD_NAME)", "demo-0")
                for item in self.container()["env"] if "value" in item}
