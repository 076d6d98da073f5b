"""Doubles in place of a library that is not installed."""

import sys
import types


def install(modules):
    """Makes modules importable; `modules` are their attributes by name."""
    for name, attributes in modules.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:length]),
                                   types.ModuleType(".".join(parts[:length])))
        vars(sys.modules[name]).update(attributes)
