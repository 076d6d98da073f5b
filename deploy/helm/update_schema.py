#!/usr/bin/env python3
"""Brings the chart's values.schema.json up to date with the server's configuration keys.

Run it after a key was added or its bounds changed; a test tells when. Everything but the keys below
`config` is written by hand and stays as it is.
"""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "deploy/helm/mla-server/values.schema.json"
# Keys that the templates set, through the environment.
OWN_KEYS = {"server.listen", "server.unix_path", "server.insecure", "ops.listen", "log.format",
            "checkpoint.path",
            "tls.cert", "tls.key", "tls.client_ca", "tls.reload_ms"}


def rule(kind, limits):
    """The schema of a value, from its type and range in the reference."""
    if kind in ("count", "milliseconds", "ratio"):
        number = float if kind == "ratio" else int
        low, high = (number(limit) for limit in limits.split(" .. "))
        return {"type": "number" if kind == "ratio" else "integer", "minimum": low,
                "maximum": high}
    if kind == "choice":
        return {"enum": limits.replace('"', "").split(", ")}
    return {"bytes": {"$ref": "#/definitions/bytes"}, "bool": {"type": "boolean"},
            "text": {"type": "string"}}[kind]


def config_schema():
    """The schema of `config`: every key of docs/configuration.md that is not the chart's own."""
    manual = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    sections = {}
    for section, key, kind, limits in re.findall(
            r"^### `(\w+)\.(\w+)`\n.*?^- type: (\w+)(?:; (.*?))?$", manual, re.M | re.S):
        if f"{section}.{key}" not in OWN_KEYS:
            keys = sections.setdefault(section, {"type": "object", "additionalProperties": False,
                                                 "properties": {}})
            keys["properties"][key] = rule(kind, limits)
    # The grace period is computed from it.
    sections["server"]["required"] = ["drain_deadline_ms"]
    return {"type": "object", "additionalProperties": False, "required": ["server"],
            "properties": sections}


def main():
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    schema["properties"]["config"] = config_schema()
    SCHEMA.write_text(json.dumps(schema, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
