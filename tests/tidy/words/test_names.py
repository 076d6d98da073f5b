"""Variables that live long have a name that says what they hold.

`to`, `at`, `most`, `found`, `made` and `left` are for variables whose uses a reader sees at once:
the last use is at most three lines below the declaration. `left` may also be the operand that
`right` is not. The test looks for declarations in C++.
"""

import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# pylint: disable=wrong-import-position
import cpp_text
from test_tidy import CPP, read, tracked

FOLDERS = ("base/", "client/", "kernels/", "proto/", "relay/", "scheduler/", "server/")
MOST_LINES = 3  # between the lines of the declaration and of the last use
NAMES = ("at", "found", "left", "made", "most", "to")
# A type, then the name, then what follows a declared name. Words that are not types are excepted.
DECLARATION = re.compile(
    r"(?:(?<![\w.>])(?!(?:return|case|goto|throw|else|delete|new|co_return|not)\b)[\w:]+"
    r"(?:<[^;{}]*?>)?(?:\s+const)?[\s&*]+|[>\]]\s*[&*]*\s+|\bauto\s*[&*]*\s*\[[^\]]*?\b)"
    r"(?P<name>" + "|".join(NAMES) + r")\b(?=\s*(?:[=;,){(:\]\[]|$))", re.M)

FUNCTION = re.compile(r"\w+\([^()]*\)\s*(?:const|noexcept|override|\{)")


def inside_parentheses(text, position):
    """Returns true if the position is in a parameter list or the head of a statement."""
    depth = 0
    for char in reversed(text[:position]):
        if char == ")":
            depth -= 1
        elif char == "(":
            depth += 1
            if depth > 0:
                return True
        elif char in "{}" or (char == ";" and depth == 0):
            return False
    return False


def scope_end(text, position):
    """Where the scope of the name that is declared at `position` ends."""
    depth, parentheses = 0, 1 if inside_parentheses(text, position) else 0
    is_head = parentheses == 1
    for index in range(position, len(text)):
        char = text[index]
        if char == "(":
            parentheses += 1
        elif char == ")":
            parentheses -= 1
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth < 0 or (is_head and depth == 0 and parentheses <= 0):
                return index
        elif char == ";" and is_head and depth == 0 and parentheses <= 0:
            return index
    return len(text)


def long_lived(source):
    """Yields (line, name, lines) of each such variable of C++ `source` whose last use is more than
    MOST_LINES below its declaration."""
    text = cpp_text.without_comments(source)
    for match in DECLARATION.finditer(text):
        name, begin = match["name"], match.start("name")
        scope = text[begin:scope_end(text, begin)]
        if FUNCTION.match(scope) or (name == "left" and re.search(r"\bright\b", scope)):
            continue
        last = [use for use in re.finditer(rf"(?<![\w.>])(?<!::){name}\b", scope)][-1]
        lines = scope.count("\n", 0, last.start())
        if lines > MOST_LINES:
            yield text.count("\n", 0, begin) + 1, name, lines


class NamesTest(unittest.TestCase):
    def test_short_names_live_three_lines(self):
        faults = [f"{path}:{line}: {name} is used {lines} lines below, at most {MOST_LINES}"
                  for path in tracked(*CPP) if path.startswith(FOLDERS)
                  for line, name, lines in long_lived(read(path))]
        self.assertFalse(faults, "\n" + "\n".join(faults))

    def test_declarations_are_found(self):
        body = "  a();\n  b();\n  c();\n  d();\n  Use(at);\n}\n"
        for head in ("void F() {\n  int at = 3;\n", "void F() {\n  const auto at = G();\n",
                     "void F(const std::vector<int>& at) {\n", "void F(char* at, int n) {\n",
                     "void F() {\n  std::map<int, int> at;\n",
                     "void F() {\n  auto [at, n] = G();\n",
                     "void F() {\n  for (size_t at = 0; at < 3; ++at) {\n"):
            with self.subTest(head=head):
                self.assertEqual([name for _, name, _ in long_lived(head + body)], ["at"])

    def test_uses_and_short_lives_are_not(self):
        for text in ("void F() {\n  int at = 3;\n  Use(at);\n}\n",
                     "void F() {\n  int x = v.at(3);\n\n\n\n  v.at(4);\n}\n",
                     "int F(int at);\n\n\n\nint at2 = 3;\n",
                     "void F() {\n  return at;\n}\n\n\n\nvoid G(int at) {}\n",
                     "void F() {\n  // int at = 3\n\n\n\n  Use(at);\n}\n",
                     "struct S {\n  int at(int slot) const { return slot; }\n\n\n\n\n  int at_;\n"
                     "  int b = at(3);\n};\n",
                     "void F() {\n  float left[3], right[3];\n\n\n\n\n  Use(left);\n}\n"):
            with self.subTest(text=text):
                self.assertEqual(list(long_lived(text)), [])


if __name__ == "__main__":
    unittest.main()
