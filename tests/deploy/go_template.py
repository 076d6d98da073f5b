"""Renders the subset of Go templates, with Helm's functions, that the chart is written in.

It is stricter than Helm: a field that does not exist is an error, not nothing. `touched` collects
the paths below .Values that were read, so that a test can see which values have no effect.
"""

import hashlib
import re

import yaml

_ACTION = re.compile(r"\{\{(-\s)?\s*(.*?)\s*(\s-)?\}\}", re.S)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+|\$?\.?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*'
                    r"|\$|\.(?![A-Za-z_])|[|()]")


class TemplateError(Exception):
    """The error that `fail`, `required` or a missing field raises."""


class Tracked(dict):
    """Values that remember which of them were read."""

    def __init__(self, values, touched, path=""):
        super().__init__((key, Tracked(value, touched, f"{path}{key}.")
                          if isinstance(value, dict) else value)
                         for key, value in values.items())
        self.touched, self.path = touched, path


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _text(value):
    return {True: "true", False: "false", None: ""}.get(value, value) \
        if isinstance(value, (bool, type(None))) else str(value)


def _to_yaml(value):
    return yaml.safe_dump(_plain(value), default_flow_style=False, width=10 ** 6).rstrip("\n")


def _indent(count, text):
    return "\n".join(" " * count + line for line in text.split("\n"))


def _fail(message):
    raise TemplateError(message)


FUNCTIONS = {
    "add": lambda *values: sum(values),
    "and": lambda *values: next((v for v in values if not v), values[-1]),
    "contains": lambda part, text: part in text,
    "default": lambda fallback, value: value or fallback,
    "div": lambda a, b: a // b,
    "fail": _fail,
    "fromYaml": yaml.safe_load,
    "get": lambda mapping, key: mapping[key],
    "int": int,
    "list": lambda *values: list(values),
    "nindent": lambda count, text: "\n" + _indent(count, text),
    "not": lambda value: not value,
    "or": lambda *values: next((v for v in values if v), values[-1]),
    "printf": lambda form, *values: form % values,
    "quote": lambda value: '"' + _text(value).replace("\\", "\\\\").replace('"', '\\"') + '"',
    "required": lambda message, value: value or _fail(message),
    "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
    "toYaml": _to_yaml,
    "trimSuffix": lambda suffix, text: text.removesuffix(suffix),
    "trunc": lambda count, text: text[:count],
}


def _split(source):
    """Splits the template into ("text", ...) and ("action", ...) parts, with white space trimmed
    where the actions ask for it."""
    parts, position, trim = [], 0, False
    for match in _ACTION.finditer(source):
        text = source[position:match.start()]
        text = text.lstrip() if trim else text
        parts.append(("text", text.rstrip() if match[1] else text))
        if not match[2].startswith("/*"):
            parts.append(("action", match[2]))
        position, trim = match.end(), bool(match[3])
    text = source[position:]
    return parts + [("text", text.lstrip() if trim else text)]


def _block(parts, defines):
    """Parses up to the closing action. Returns (nodes, that action)."""
    nodes = []
    while parts:
        kind, content = parts.pop(0)
        word, _, rest = content.partition(" ") if kind == "action" else ("", "", "")
        if kind == "text":
            nodes.append(("text", content))
        elif word in ("end", "else"):
            return nodes, content
        elif word in ("if", "with", "range"):
            body, closing = _block(parts, defines)
            branches = [(word, rest, body)]
            while closing.startswith("else if "):
                body, following = _block(parts, defines)
                branches.append(("if", closing[8:], body))
                closing = following
            if closing == "else":
                body, closing = _block(parts, defines)
                branches.append(("else", "", body))
            nodes.append(("branches", branches))
        elif word == "define":
            defines[rest.strip('"')], _ = _block(parts, defines)
        else:
            nodes.append(("action", content))
    return nodes, ""


class Renderer:
    """Templates that may include each other, rendered over one root (.Values, .Release, ...)."""

    def __init__(self, root, files):
        self.touched = set()
        self.root = {**root, "Values": Tracked(root["Values"], self.touched),
                     "Files": {"Get": lambda path: files[path]}}
        self.defines = {}

    def add(self, source):
        """Parses a file and returns its own nodes. Its definitions are known from then on."""
        nodes, closing = _block(_split(source), self.defines)
        if closing:
            raise TemplateError(f"{closing} closes nothing")
        return nodes

    def render(self, nodes, dot=None, scope=None):
        dot = self.root if dot is None else dot
        scope = {} if scope is None else scope
        return "".join(self._node(node, dot, scope) for node in nodes)

    def _node(self, node, dot, scope):
        if node[0] == "text":
            return node[1]
        if node[0] == "branches":
            return self._branches(node[1], dot, scope)
        declared = re.match(r"\$(\w+) :?= (.*)", node[1], re.S)
        if declared:
            scope[declared[1]] = self._value(declared[2], dot, scope)
            return ""
        return _text(self._value(node[1], dot, scope))

    def _branches(self, branches, dot, scope):
        for word, condition, body in branches:
            names = re.match(r"\$(\w+) := (.*)", condition, re.S)
            value = word == "else" or self._value(names[2] if names else condition, dot, scope)
            if not value:
                continue
            if word == "range":
                return "".join(self.render(body, item, {**scope, **({names[1]: item} if names
                                                                     else {})})
                               for item in value)
            return self.render(body, value if word == "with" else dot, dict(scope))
        return ""

    def _value(self, pipeline, dot, scope):
        tokens = _TOKEN.findall(pipeline)
        if "".join(tokens) != re.sub(r'("(?:[^"\\]|\\.)*")|\s+', lambda m: m[1] or "", pipeline):
            raise TemplateError(f"not of the known subset: {pipeline}")
        value = self._pipeline(tokens, dot, scope)
        if tokens:
            raise TemplateError(f"more than an expression: {pipeline}")
        return value

    def _pipeline(self, tokens, dot, scope):
        value = self._command(tokens, dot, scope, [])
        while tokens and tokens[0] == "|":
            tokens.pop(0)
            value = self._command(tokens, dot, scope, [value])
        return value

    def _command(self, tokens, dot, scope, piped):
        name = tokens[0]
        function = FUNCTIONS.get(name)
        if name == "include":
            function = lambda define, over: self.render(self.defines[define], over, {})
        if function is None:
            value = self._operand(tokens, dot, scope)
            arguments = self._operands(tokens, dot, scope) + piped
            return value(*arguments) if callable(value) else value
        tokens.pop(0)
        return function(*self._operands(tokens, dot, scope), *piped)

    def _operands(self, tokens, dot, scope):
        found = []
        while tokens and tokens[0] not in ("|", ")"):
            found.append(self._operand(tokens, dot, scope))
        return found

    def _operand(self, tokens, dot, scope):
        token = tokens.pop(0)
        if token == "(":
            value = self._pipeline(tokens, dot, scope)
            tokens.pop(0)
            return value
        if token[0] == '"':
            return yaml.safe_load(token)
        if re.fullmatch(r"-?\d+", token):
            return int(token)
        if token in ("true", "false"):
            return token == "true"
        first, *fields = token.split(".")
        if first == "":
            value = dot
        elif first == "$":
            value = self.root
        elif first[0] == "$":
            value = scope[first[1:]]
        else:
            raise TemplateError(f"no function {token}")
        owner, field = None, ""
        for field in filter(None, fields):
            if field not in value:
                raise TemplateError(f"no field {field} in {token}")
            owner, value = value, value[field]
        if isinstance(owner, Tracked):
            owner.touched.add(owner.path + field)
        return value
