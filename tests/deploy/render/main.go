// Renders the templates of a chart as Helm does: Go's text/template with sprig and the functions that
// Helm adds. Reads one JSON object on standard input,
//
//	{"root": {"Values": ..., "Chart": ..., "Release": ...}, "files": {name: text},
//	 "templates": {name: text}}
//
// and writes {name: rendered text}, or {"error": text}, which `fail` and `required` cause, too. Stricter
// than Helm: a key that is missing in a map is an error.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"gopkg.in/yaml.v2"
)

type input struct {
	Root      map[string]interface{}
	Files     map[string]string
	Templates map[string]string
}

// files has the method that templates call .Files.Get by.
type files map[string]string

func (f files) Get(name string) string { return f[name] }

// By way of JSON, as Helm does it: whole numbers come out without an exponent.
func toYaml(value interface{}) (string, error) {
	text, err := json.Marshal(plain(value))
	if err != nil {
		return "", err
	}
	var read interface{}
	if err := yaml.Unmarshal(text, &read); err != nil {
		return "", err
	}
	out, err := yaml.Marshal(read)
	return strings.TrimSuffix(string(out), "\n"), err
}

// JSON objects have string keys; YAML maps may have others.
func plain(value interface{}) interface{} {
	switch typed := value.(type) {
	case map[interface{}]interface{}:
		out := map[string]interface{}{}
		for key, item := range typed {
			out[fmt.Sprint(key)] = plain(item)
		}
		return out
	case map[string]interface{}:
		out := map[string]interface{}{}
		for key, item := range typed {
			out[key] = plain(item)
		}
		return out
	case []interface{}:
		out := make([]interface{}, len(typed))
		for i, item := range typed {
			out[i] = plain(item)
		}
		return out
	}
	return value
}

func fromYaml(text string) (map[string]interface{}, error) {
	value := map[string]interface{}{}
	err := yaml.Unmarshal([]byte(text), &value)
	return value, err
}

func required(message string, value interface{}) (interface{}, error) {
	if value == nil || value == "" {
		return value, fmt.Errorf("%s", message)
	}
	return value, nil
}

func render(in input) (map[string]string, error) {
	root := template.New("chart").Option("missingkey=error")
	functions := sprig.TxtFuncMap()
	// Helm takes these away: charts must not read the environment.
	delete(functions, "env")
	delete(functions, "expandenv")
	functions["toYaml"] = toYaml
	functions["fromYaml"] = fromYaml
	functions["required"] = required
	functions["include"] = func(name string, data interface{}) (string, error) {
		var out bytes.Buffer
		err := root.ExecuteTemplate(&out, name, data)
		return out.String(), err
	}
	root.Funcs(functions)
	for name, text := range in.Templates {
		if _, err := root.New(name).Parse(text); err != nil {
			return nil, err
		}
	}
	in.Root["Files"] = files(in.Files)
	texts := map[string]string{}
	for name := range in.Templates {
		var out bytes.Buffer
		if err := root.ExecuteTemplate(&out, name, in.Root); err != nil {
			return nil, err
		}
		texts[name] = out.String()
	}
	return texts, nil
}

func main() {
	var in input
	decoder := json.NewDecoder(os.Stdin)
	// As Helm does it, numbers are floats: templates must say int.
	if err := decoder.Decode(&in); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	texts, err := render(in)
	if err != nil {
		texts = map[string]string{"error": err.Error()}
	}
	if err := json.NewEncoder(os.Stdout).Encode(texts); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
