"""Checks objects of Kubernetes with models that were made from its interface and from the custom
resources of the Prometheus operator and cert-manager.

    chart_models.py FILE    # JSON: a list of objects

Runs in the environment chart-models (tests/engines/environments.py). Prints the kinds that it has
checked, then each fault: a field that is missing, has a wrong type, or is not known. Exits with 1
if there is a fault or an object without a model."""

import importlib
import inspect
import json
import pathlib
import pkgutil
import sys

PACKAGES = ("kubernetes", "prometheus_operator", "cert_manager")


def models():
    """The class of each (apiVersion, kind)."""
    found = {}
    for package in PACKAGES:
        root = importlib.import_module(f"cloudcoil.models.{package}")
        for module in pkgutil.walk_packages(root.__path__, root.__name__ + "."):
            for name, kind in inspect.getmembers(importlib.import_module(module.name),
                                                 inspect.isclass):
                fields = getattr(kind, "model_fields", {})
                if {"api_version", "kind"} <= set(fields) and fields["kind"].default == name:
                    found[fields["api_version"].default, name] = kind
    return found


def with_texts(item):
    """The object with quantities as texts: the interface takes numbers as well, the models do
    not."""
    if isinstance(item, dict):
        return {key: {name: str(value) for name, value in part.items()}
                if key in ("limits", "requests") and isinstance(part, dict) else with_texts(part)
                for key, part in item.items()}
    return [with_texts(part) for part in item] if isinstance(item, list) else item


def lost(known, given, path):
    """Paths of what the model has not taken: fields that it does not know."""
    if isinstance(given, dict):
        known = known if isinstance(known, dict) else {}
        return [fault for key, part in given.items() for fault in
                (lost(known[key], part, f"{path}.{key}") if key in known else [f"{path}.{key}"])]
    if isinstance(given, list):
        known = known if isinstance(known, list) else []
        return [fault for i, part in enumerate(given) for fault in
                lost(known[i] if i < len(known) else None, part, f"{path}[{i}]")]
    return []


def faults_of(kinds, item):
    """What is wrong with an object, in words."""
    kind = kinds.get((item["apiVersion"], item["kind"]))
    if kind is None:
        return [f"{item['apiVersion']} {item['kind']}: no model"]
    try:
        taken = kind.model_validate(with_texts(item))
    except ValueError as error:
        return [f"{item['kind']}: {error}"]
    known = json.loads(taken.model_dump_json(by_alias=True, exclude_none=True))
    return [f"{path}: not known" for path in lost(known, item, item["kind"])]


def main(path):
    items = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    kinds = models()
    print(*sorted({item["kind"] for item in items}))
    faults = [fault for item in items for fault in faults_of(kinds, item)]
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
