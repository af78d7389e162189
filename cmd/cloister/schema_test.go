// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-cmp/cmp"
	"github.com/google/jsonschema-go/jsonschema"
	"github.com/spf13/cobra"
)

// TestSchemasAreCurrent generates the schema of each command with --json and compares it with the one in schemas.
func TestSchemasAreCurrent(t *testing.T) {
	const committed = "schemas"
	dir := t.TempDir()
	if *updateReference {
		dir = committed
		must.Succeed(t, os.RemoveAll(dir))
		must.Succeed(t, os.Mkdir(dir, 0o755))
	}
	g := &generator{TB: t, comments: map[string]map[string]string{}}
	commands(func(cmd *cobra.Command) {
		if cmd.Flags().Lookup("json") == nil {
			return
		}
		printed := render.Printed(cmd)
		if len(printed) == 0 {
			t.Errorf("%s --json has no types: add the flag with render.JSONFlag", cmd.CommandPath())
			return
		}
		path := strings.TrimPrefix(cmd.CommandPath(), "cloister ")
		s := g.schema(printed)
		s.Schema, s.Title = "https://json-schema.org/draft/2020-12/schema", "cloister "+path+" --json"
		text := must.Get(json.MarshalIndent(s, "", "  "))(t)
		must.Succeed(t, os.WriteFile(filepath.Join(dir, strings.ReplaceAll(path, " ", "_")+".json"), append(text, '\n'), 0o644))
	})
	expect.Equal(t, cmp.Diff(readSchemas(t, committed), readSchemas(t, dir)), "",
		"cmd/cloister/schemas is not current; run make reference (- committed, + generated)")
}

func readSchemas(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	for _, path := range must.Get(filepath.Glob(filepath.Join(dir, "*.json")))(t) {
		files[filepath.Base(path)] = string(must.Get(os.ReadFile(path))(t))
	}
	return files
}

// A generator makes schemas of Go types, with the comments of their fields as descriptions.
type generator struct {
	testing.TB
	comments map[string]map[string]string // of TYPE.FIELD, by package
}

// special are types whose JSON form does not follow from their fields.
var special = map[reflect.Type]*jsonschema.Schema{
	reflect.TypeFor[cas.Digest]():      {Type: "string", Description: "[FUNCTION:]HASH/SIZE"},
	reflect.TypeFor[json.RawMessage](): {},
}

// schema returns the schema of a value of one of several types.
func (g *generator) schema(printed []reflect.Type) *jsonschema.Schema {
	g.Helper()
	var all []*jsonschema.Schema
	for _, p := range printed {
		for p.Kind() == reflect.Pointer { // never nil
			p = p.Elem()
		}
		s := must.Get(jsonschema.ForType(p, &jsonschema.ForOptions{TypeSchemas: special}))(g.TB)
		g.describe(s, p)
		if p.Kind() == reflect.Slice { // never nil
			s.Type, s.Types = "array", nil
		}
		all = append(all, s)
	}
	if len(all) == 1 {
		return all[0]
	}
	return &jsonschema.Schema{AnyOf: all}
}

// describe adds descriptions to the schema of a type, and permits the fields that later versions add.
func (g *generator) describe(s *jsonschema.Schema, of reflect.Type) {
	g.Helper()
	switch {
	case of.Kind() == reflect.Pointer:
		g.describe(s, of.Elem())
	case special[of] != nil:
	case of.Kind() == reflect.Slice || of.Kind() == reflect.Array:
		g.describe(s.Items, of.Elem())
	case of.Kind() == reflect.Map:
		g.describe(s.AdditionalProperties, of.Elem())
	case of.Kind() == reflect.Struct && len(s.Properties) > 0:
		s.AdditionalProperties = nil
		for _, f := range reflect.VisibleFields(of) {
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			property := s.Properties[name]
			if name == "" || property == nil {
				continue
			}
			owner := of
			for _, i := range f.Index[:len(f.Index)-1] {
				if owner = owner.Field(i).Type; owner.Kind() == reflect.Pointer {
					owner = owner.Elem()
				}
			}
			g.describe(property, f.Type)
			if text := g.comment(owner, f.Name); text != "" {
				property.Description = text
			}
		}
	}
}

// comment returns the comment of a field in the source of its type.
func (g *generator) comment(owner reflect.Type, field string) string {
	g.Helper()
	const module = "github.com/cloister-build/cloister/"
	where, ours := strings.CutPrefix(owner.PkgPath(), module)
	if !ours {
		g.Fatalf("%s is a type of package %q: add it to special", owner, owner.PkgPath())
	}
	if g.comments[where] == nil {
		g.comments[where] = map[string]string{}
		for _, path := range must.Get(filepath.Glob(filepath.Join("../..", where, "*.go")))(g.TB) {
			g.read(where, path)
		}
	}
	text, known := g.comments[where][owner.Name()+"."+field]
	if !known {
		g.Fatalf("no field %s of %s in the source of %s", field, owner, where)
	}
	return text
}

func (g *generator) read(where, path string) {
	g.Helper()
	file := must.Get(parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments))(g.TB)
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok {
			return true
		}
		if s, ok := spec.Type.(*ast.StructType); ok {
			for _, f := range s.Fields.List {
				text := strings.Join(strings.Fields(f.Doc.Text()+" "+f.Comment.Text()), " ")
				for _, name := range f.Names {
					g.comments[where][spec.Name.Name+"."+name.Name] = text
				}
			}
		}
		return true
	})
}

// TestSchemaCommand prints schemas, and lists the commands that have one.
func TestSchemaCommand(t *testing.T) {
	list, code := runCLI(t, "schema")
	expect.Equal(t, code, 0, "exit code of schema")
	names := strings.Split(strings.TrimSpace(list), "\n")
	expect.Equal(t, len(names), len(readSchemas(t, "schemas")), "listed commands")
	for _, name := range names {
		out, code := runCLI(t, append([]string{"schema"}, strings.Fields(name)...)...)
		expect.That(t, code == 0 && strings.Contains(out, `"title": "cloister `+name+` --json"`), "%s: exit %d, %s", name, code, out)
	}
	out, code := runCLI(t, "schema", "serve")
	expect.That(t, code == 2 && strings.Contains(out, `"serve" has no JSON schema`), "serve: exit %d, %s", code, out)
}

// TestSchemasMatchTypes validates the encodings of an empty and of a filled value of each type.
func TestSchemasMatchTypes(t *testing.T) {
	commands(func(cmd *cobra.Command) {
		name := strings.ReplaceAll(strings.TrimPrefix(cmd.CommandPath(), "cloister "), " ", "_")
		for _, p := range render.Printed(cmd) {
			if p.Kind() == reflect.Pointer {
				p = p.Elem()
			}
			var s jsonschema.Schema
			must.Succeed(t, json.Unmarshal(must.Get(schemas.ReadFile("schemas/"+name+".json"))(t), &s))
			schema := must.Get(s.Resolve(nil))(t)
			empty, filled := reflect.New(p).Elem(), reflect.New(p).Elem()
			if p.Kind() == reflect.Slice {
				empty = reflect.MakeSlice(p, 1, 1)
			}
			fill(filled)
			for _, v := range []reflect.Value{empty, filled} {
				text := must.Get(json.Marshal(v.Interface()))(t)
				var decoded any
				must.Succeed(t, json.Unmarshal(text, &decoded))
				err := schema.Validate(decoded)
				expect.That(t, err == nil, "%s: got %v for %s", cmd.CommandPath(), err, text)
			}
		}
	})
}

// fill sets everything in v.
func fill(v reflect.Value) {
	switch v.Interface().(type) {
	case json.RawMessage:
		v.SetBytes([]byte(`{"a": [1]}`))
		return
	case time.Time:
		v.Set(reflect.ValueOf(time.Unix(1, 0).UTC()))
		return
	case cas.Digest:
		v.Set(reflect.ValueOf(cas.SHA256.Sum([]byte("x"))))
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		element := reflect.New(v.Type().Elem()).Elem()
		fill(element)
		v.SetMapIndex(reflect.ValueOf("key").Convert(v.Type().Key()), element)
	case reflect.Interface:
		v.Set(reflect.ValueOf("anything"))
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() && f.Tag.Get("json") != "-" {
				fill(v.Field(i))
			}
		}
	case reflect.String:
		v.SetString("text")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Float64:
		v.SetFloat(1.5)
	case reflect.Array:
		for i := range v.Len() {
			fill(v.Index(i))
		}
	default:
		v.Set(reflect.ValueOf(7).Convert(v.Type()))
	}
}
