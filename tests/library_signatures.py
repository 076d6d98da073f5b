"""Signatures of a library that the client relies on, read from the installed library and from a
file."""

import importlib
import inspect
import json


def parameters(function):
    """Names of parameters, with stars where they have some, and = where they have a default."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [stars.get(parameter.kind, "") + parameter.name
            + ("=" if parameter.default is not inspect.Parameter.empty else "")
            for parameter in inspect.signature(function).parameters.values()
            if parameter.name not in ("self", "cls")]


def installed(names):
    """Signatures of the library that import finds. `names` are lists of attributes by module."""
    found = {}
    for module, attributes in names.items():
        loaded = importlib.import_module(module)
        for name in attributes:
            value = loaded
            for part in name.split("."):
                value = getattr(value, part)
            found[f"{module}.{name}"] = parameters(value)
    return found


def read(path):
    """Signatures in the file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write(names, path):
    """Writes the signatures of the library that import finds, one per line."""
    lines = [f" {json.dumps(name)}: {json.dumps(found)}"
             for name, found in installed(names).items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def differences(names, want):
    """The differences between the installed library and `want`."""
    got = installed(names)
    return [f"{name}: got {got.get(name)}, must be {want.get(name)}"
            for name in sorted({*want, *got}) if got.get(name) != want.get(name)]
