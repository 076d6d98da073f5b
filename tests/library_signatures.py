"""Signatures of a library that the client relies on, read from the installed library and from a
file."""

import ast
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


def write(found, path):
    """Writes signatures, one per line."""
    lines = [f" {json.dumps(name)}: {json.dumps(each)}" for name, each in found.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def differences(names, want):
    """The differences between the installed library and `want`."""
    got = installed(names)
    return [f"{name}: got {got.get(name)}, must be {want.get(name)}"
            for name in sorted({*want, *got}) if got.get(name) != want.get(name)]


def in_source(names, root):
    """As `installed`, of a library's sources below `root`, of which nothing is imported; a name
    that they do not have is left out. Classes without an __init__ have that of their fields."""
    found = {}
    for module, attributes in names.items():
        path = root.joinpath(*module.split("."))
        files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
        known = _members(ast.parse(files[0].read_text(encoding="utf-8"))) if files else {}
        for name in attributes:
            owner, _, method = name.partition(".")
            node = known.get(owner)
            inner = _members(node).get(method) if method and node is not None else None
            if inner is not None:
                found[f"{module}.{name}"] = _arguments(inner, True)
            elif method == "__init__" and node is not None:
                found[f"{module}.{name}"] = _fields(node, known)
            elif node is not None and not method:
                found[f"{module}.{name}"] = _arguments(node, False)
    return found


def _members(tree):
    return {node.name: node for node in tree.body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))}


def _arguments(function, method):
    given = function.args
    names = [each.arg for each in given.posonlyargs + given.args]
    first = len(names) - len(given.defaults)
    names = [name + ("=" if place >= first else "") for place, name in enumerate(names)]
    static = any(getattr(each, "id", "") == "staticmethod" for each in function.decorator_list)
    names = names[1:] if method and not static else names
    if given.vararg:
        names.append(f"*{given.vararg.arg}")
    names += [each.arg + ("" if default is None else "=")
              for each, default in zip(given.kwonlyargs, given.kw_defaults)]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def _fields(cls, known):
    """Fields of a dataclass, those of its bases in the same module first."""
    own = []
    for base in cls.bases:
        if isinstance(base, ast.Name) and isinstance(known.get(base.id), ast.ClassDef):
            own += _fields(known[base.id], known)
    return own + [node.target.id + ("" if node.value is None else "=") for node in cls.body
                  if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
                  and "ClassVar" not in ast.dump(node.annotation)]
