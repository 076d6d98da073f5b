"""A light reading of PromQL: the metrics and labels that an expression uses. Also reads the
server's own list of them."""

import pathlib
import re

import grpc

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEYWORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}
# Labels that are not the server's own: a scrape adds the first two, and the target may have the
# last.
TARGET_LABELS = {"job", "instance", "accelerator"}
SUFFIXES = {"counter": [""], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}

_TOKEN = re.compile(r'(?P<string>"(?:[^"\\]|\\.)*")|(?P<range>\[[^\]]*\])|'
                    r"(?P<number>\d[\w.]*)|(?P<name>[A-Za-z_:][\w:]*)|(?P<other>\S)")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_GRAFANA = re.compile(r"\$(?:__)?[a-z_]+|\$\{[a-z_]+\}")


def selectors(expression):
    """Yields (metric, [(label, operator, value)]) for each selector of the expression."""
    text = _GROUPING.sub(" ", expression)
    tokens = [match for match in _TOKEN.finditer(text) if not match["range"]] + [None]
    metric = start = None  # of the current selector; `start` is set inside its braces
    for token, following in zip(tokens, tokens[1:]):
        char = following[0] if following else ""
        if start is not None:
            if token[0] == "}":
                yield metric, _MATCHER.findall(text[start:token.start()])
                start = None
        elif token[0] == "{":
            start = token.end()
        elif token["name"] and token[0] not in KEYWORDS and char != "(":
            metric = token[0]
            if char != "{":
                yield metric, []


def grouping_labels(expression):
    """Labels in clauses such as `by` and `on`."""
    return {label.strip() for _, labels in _GROUPING.findall(expression)
            for label in labels.split(",") if label.strip()}


def plain(expression):
    """A dashboard's expression in the form that Prometheus receives."""
    text = expression.replace("$__rate_interval", "5m").replace("$__range", "1h")
    return _GRAFANA.sub("x", text)


def exported():
    """{metric: type} as the manual lists them; a test keeps that list equal to the server's."""
    manual = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \|", manual, re.M))


def exported_labels():
    """{metric: {label: set of values, empty when they are not fixed}}, from the declarations."""
    text = " ".join((ROOT / "server/metrics/metrics.cc").read_text(encoding="utf-8").split())
    found = {name: {} for name in exported()}
    families = dict((variable, name) for variable, name in
                    re.findall(r'& (\w+) = \w+Family\("(\w+)"\)', text))
    calls = [(name, labels) for name, labels in
             re.findall(r'One(?:Gauge|Histogram)?\("(\w+)"(?:, \w+)?, \{(\{[^;]*?\})\}\)', text)]
    calls += [(families[variable], labels) for variable, labels in
              re.findall(r"(\w+)(?:\.|->)Add\(\{(\{[^;]*?\})\}\)", text)]
    for name, labels in calls:
        for label, value in re.findall(r'\{"(\w+)", ([^{}]+)\}', labels):
            values = found[name].setdefault(label, set())
            values.update(re.findall(r'^"(\w+)"$', value))
    source = (ROOT / "server/metrics/histograms.cc").read_text(encoding="utf-8")
    histograms = " ".join(source.split())
    for name, label, value in re.findall(r'[({]"(\w+)", \w+, \{"(\w+)", "(\w+)"\}', histograms):
        found[name].setdefault(label, set()).add(value)
    table = (ROOT / "server/metrics/stats_table.cc").read_text(encoding="utf-8")
    for row in re.findall(r"^    Row\((.*?)\),$", table, re.S | re.M):
        labelled = re.search(r'"(\w+)",\s+"(\w+)"(?:,\s+[\de.-]+)?$', row)
        name = re.search(r'^\s*(?:nullptr|"\w+"),\s+"(\w+)"', row)
        if name and labelled and "MLA_" in row[:labelled.start()]:
            found[name[1]].setdefault(labelled[1], set()).add(labelled[2])
    tenants = (ROOT / "server/metrics/tenant_metrics.cc").read_text(encoding="utf-8")
    for name, first in (("mla_tenant_used", "tenant"), ("mla_tenant_bound", "tenant"),
                        ("mla_bound_refusals_total", "bound_of")):
        for label in (first, "resource"):
            assert f'{{"{label}", ' in tenants, label
            found[name].setdefault(label, set())
    found["mla_requests_total"]["code"].update(code.name for code in grpc.StatusCode)
    return found


class Catalogue:
    """The metrics that expressions may use: the server's, Prometheus' own `up`, and the `recorded`
    series, each with the labels that it keeps."""

    def __init__(self, recorded=None):
        self.labels = {"up": {}}
        declared = exported_labels()
        for name, kind in exported().items():
            for suffix in SUFFIXES[kind]:
                extra = {"le": set()} if suffix == "_bucket" else {}
                self.labels[name + suffix] = {**declared[name], **extra}
        for name, labels in (recorded or {}).items():
            values = {"code": declared["mla_requests_total"]["code"]}
            self.labels[name] = {label: values.get(label, set()) for label in labels}

    def faults(self, expression):
        """The parts of the expression that name no existing metric or label."""
        known_labels = set(TARGET_LABELS)
        for name, matchers in selectors(expression):
            if name not in self.labels:
                yield f"no metric {name}"
                continue
            labels = self.labels[name]
            known_labels |= set(labels)
            for label, operator, value in matchers:
                if label in TARGET_LABELS:
                    continue
                if label not in labels:
                    yield f"{name} has no label {label}"
                elif labels[label] and operator in ("=", "=~", "!=", "!~"):
                    for part in value.split("|") if "~" in operator else [value]:
                        if part not in labels[label]:
                            yield f"{name}: {label} is never {part}"
        for label in grouping_labels(expression) - known_labels:
            yield f"nothing has the label {label}"
