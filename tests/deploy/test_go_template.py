"""The tests' own rendering of templates does what Go and Helm do, or refuses."""

import unittest

import go_template

ROOT = {"Values": {"a": {"b": 1, "empty": ""}, "names": ["x", "y"], "map": {"k": "v"},
                   "off": False},
        "Release": {"Name": "demo"}}
# Templates and the output of Go's text/template with Helm's functions, including white space.
CASES = [
    ("{{ .Values.a.b }}-{{ $.Release.Name }}", "1-demo"),
    ("a  {{- 1 }}  b {{ 2 -}}\n c", "a1  b 2c"),
    ("x{{/* a comment */}}y", "xy"),
    ("{{ if .Values.off }}1{{ else if .Values.a.empty }}2{{ else }}3{{ end }}", "3"),
    ("{{ if and .Values.a.b (not .Values.off) }}yes{{ end }}", "yes"),
    ("{{ with .Values.map }}{{ .k }}{{ end }}{{ with .Values.a.empty }}no{{ end }}", "v"),
    ("{{ range $n := .Values.names }}{{ $n }}{{ $.Release.Name }};{{ end }}", "xdemo;ydemo;"),
    ("{{ range .Values.names }}{{ . }}{{ end }}", "xy"),
    ('{{ define "part" }}<{{ .Release.Name }}>{{ end }}{{ include "part" . | quote }}', '"<demo>"'),
    ('{{ $sum := add 1 (div 7 2) }}{{ printf "%d|%s" $sum "|" }}', "4||"),
    ("k:\n  {{- toYaml .Values.map | nindent 2 }}", "k:\n  k: v"),
    ('{{ default "d" .Values.a.empty }}{{ "abc-" | trunc 4 | trimSuffix "-" }}', "dabc"),
    ('{{ .Values.off }} {{ get (fromYaml "p: q") "p" }}', "false q"),
    ("{{ .Files.Get \"f\" }}", "text"),
]
FAULTS = ["{{ .Values.a.c }}", "{{ .Values.missing }}", "{{ upper .Release.Name }}",
          "{{ 1 }}{{ end }}", '{{ fail "no" }}', '{{ required "no" .Values.a.empty }}',
          "{{ .Values.a.b % 2 }}"]


def render(source):
    renderer = go_template.Renderer(ROOT, {"f": "text"})
    return renderer.render(renderer.add(source)), renderer.touched


class GoTemplateTest(unittest.TestCase):
    def test_what_it_renders(self):
        for source, expected in CASES:
            self.assertEqual(render(source)[0], expected, source)

    def test_what_it_refuses(self):
        for source in FAULTS:
            with self.assertRaises(go_template.TemplateError, msg=source):
                render(source)

    def test_values_that_were_read(self):
        self.assertEqual(render("{{ .Values.a.b }}{{ toYaml .Values.map }}")[1], {"a.b", "map"})
        self.assertEqual(render("{{ if .Values.off }}{{ .Values.a.b }}{{ end }}")[1], {"off"})


if __name__ == "__main__":
    unittest.main()
