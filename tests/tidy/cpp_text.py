"""A light reading of C++ text, enough for the tidy tests: no types, no preprocessor."""

import re

_TOKEN = re.compile(
    r'R"(?P<delim>[^\s()\\]{0,16})\(.*?\)(?P=delim)"'
    r'|//[^\n]*|/\*.*?\*/'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Za-z_])'(?:\\.|[^'\\\n])+'"
    r'|^[ \t]*\#(?:\\\n|[^\n])*',
    re.S | re.M)


def _blank(match):
    """Replaces content with blanks and keeps the number of lines."""
    text = match.group(0)
    return '""' + "\n" * text.count("\n") if text[0] in "\"R'" else "\n" * text.count("\n")


def without_comments(text):
    """The text with comments, literals and preprocessor lines blanked, line numbers kept."""
    return _TOKEN.sub(_blank, text)


_SCOPE = re.compile(r"^\s*(?:inline\s+)?(?:template\s*<.*>\s*)?"
                    r"(namespace|class|struct|union|enum|extern)\b", re.S)


def _kind(head, inside_code):
    """Returns the heading of the block that a `{` opens, from the text since the last `;`, `{` or
    `}`."""
    if inside_code:
        return "code"
    head = re.sub(r"^\s*(?:public|private|protected)\s*:", "", head)
    if _SCOPE.match(head) and not re.search(r"\)\s*(?:const|noexcept|override)*\s*$", head):
        return "scope"
    return "function" if ")" in head else "code"


def functions(text):
    """Yields (first line, last line, heading) of every function defined in C++ `text`."""
    text = without_comments(text)
    stack, head_start, line, head_line = [], 0, 1, 1
    head_seen = False
    for index, char in enumerate(text):
        if char == "\n":
            line += 1
        elif char == "{":
            head = text[head_start:index]
            kind = _kind(head, any(kind != "scope" for kind, _, _ in stack))
            stack.append((kind, head_line if head_seen else line, " ".join(head.split())))
        elif char == "}" and stack:
            kind, first, head = stack.pop()
            if kind == "function":
                yield first, line, head[:80]
        if char in "{};":
            head_start, head_seen = index + 1, False
        elif not char.isspace() and not head_seen:
            head_seen, head_line = True, line
