"""The Helm chart, rendered without Helm: see go_template.py."""

import copy
import json
import pathlib

import go_template
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
        "gpu": {"enabled": True, "supplementalGroups": [109, 44]},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboard": {"enabled": True},
        "podAnnotations": {"note": "x"}, "podLabels": {"team": "x"}, "nodeSelector": {"gpu": "x"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
                                       "whenUnsatisfiable": "ScheduleAnyway"}],
        "priorityClassName": "high"},
    "GPU with its runtime in the image, CPU if there is none": {
        "gpu": {"enabled": True, "backend": "", "runtimeHostPath": ""}},
    "no TLS": {"tls": {"enabled": False}, "insecure": True,
               "serviceAccount": {"create": False}, "networkPolicy": {"clients": []}},
    "unix socket only": {"tls": {"enabled": False}, "sameHost": {"hostPath": "/run/mla-server"},
                         "podDisruptionBudget": {"enabled": False}, "logFormat": "text"},
}


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
    """The chart with values laid over its defaults: `objects` by (kind, name), `notes`, and
    `touched`, the values that were read."""

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
        renderer = go_template.Renderer(root, files)
        paths = sorted((FOLDER / "templates").iterdir())
        parsed = {path.name: renderer.add(path.read_text(encoding="utf-8")) for path in paths}
        texts = {name: renderer.render(nodes) for name, nodes in parsed.items()}
        self.values, self.touched = values, renderer.touched
        self.notes = texts.pop("NOTES.txt")
        self.objects = {}
        for text in texts.values():
            for item in filter(None, yaml.safe_load_all(text)):
                key = item["kind"], item["metadata"]["name"]
                if key in self.objects:
                    raise ValueError(f"two objects {key}")
                self.objects[key] = item

    def one(self, kind):
        """The only object of a kind. The dashboard is ignored."""
        found, = [item for (its_kind, name), item in self.objects.items()
                  if its_kind == kind and not name.endswith("-dashboard")]
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
