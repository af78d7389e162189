// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

const source = `package p

import "other"

type Store interface { Get(key string) ([]byte, error); private() }
type Config struct { Name string; hidden int }
type Kind uint8
const Big Kind = 1 << 7
var Default Config
type Alias = Config
func (c *Config) Check() error { return nil }
func (c Config) unexported() {}
func Map[K comparable, V any](m map[K]V, f ...func(V) bool) (n int) { return 0 }
func internal() {}
type Wrapper struct { *other.Element }
`

const other = `package other

type Element struct { Value any }
func (e *Element) Next() *Element { return nil }
`

// An imported is an importer that knows one package.
type imported struct{ p *types.Package }

func (i imported) Import(string) (*types.Package, error) { return i.p, nil }

// check compiles a package that may import another one.
func check(t *testing.T, path, source string, imports *types.Package) *types.Package {
	t.Helper()
	set := token.NewFileSet()
	f := must.Get(parser.ParseFile(set, "p.go", source, 0))(t)
	return must.Get((&types.Config{Importer: imported{imports}}).Check(path, set, []*ast.File{f}, nil))(t)
}

// Every exported identifier has a line with its type, promoted ones included, and nothing else has one.
func TestDescribe(t *testing.T) {
	p := check(t, module+"/a/p", source, check(t, "other", other, nil))
	want := []string{
		"a/p: type Alias = Config",
		"a/p: const Big Kind = 128",
		"a/p: type Config struct",
		"a/p: field (Config) Name string",
		"a/p: method (*Config) Check() error",
		"a/p: var Default Config",
		"a/p: type Kind uint8",
		"a/p: func Map[K comparable, V any](m map[K]V, f ...func(V) bool) (n int)",
		"a/p: type Store interface with unexported methods",
		"a/p: method (Store) Get(key string) ([]byte, error)",
		"a/p: type Wrapper struct",
		"a/p: field (Wrapper) Element *other.Element",
		"a/p: field (Wrapper) Value any",
		"a/p: method (Wrapper) Next() *other.Element",
	}
	expect.Slices(t, describe(p), want)
}

// Fields and methods of interfaces belong to their types.
func TestIdentifiers(t *testing.T) {
	lines := []string{
		"p: type A struct", "p: field (A) F int", "p: method (A) M()", "p: type B[T any] interface", "p: method (B) M()", "p: func F()",
	}
	expect.Equal(t, identifiers(lines), 4, "identifiers A, A.M, B and F")
}

// A changed line is both removed and added, and equal texts have no difference.
func TestDifference(t *testing.T) {
	expect.Equal(t, difference("a\nb 1\n", "a\nb 2\n"), "- b 1\n+ b 2\n")
	expect.Equal(t, difference("a\nb\n", "a\nb\n"), "", "equal texts")
}

// A public struct exposes the fields of structs of other packages of the module, at any depth, and no methods.
func TestExposed(t *testing.T) {
	const settings = `package settings

type Config struct { Limits map[string][]*Limit; Self *Config; hidden Hidden }
type Limit struct { Bytes int64 }
type Hidden struct { Secret string }
type Unused struct { Field string }
func (c *Config) Check() error { return nil }
`
	const source = `package p

import "settings"

type Config struct { Settings settings.Config }
`
	other := check(t, module+"/settings", settings, nil)
	public := check(t, module+"/p", source, other)
	want := []string{
		"settings: field (Config) Limits map[string][]*Limit", "settings: field (Config) Self *Config", "settings: field (Limit) Bytes int64",
	}
	expect.Slices(t, exposed([]*types.Package{public}), want)
	if got := exposed([]*types.Package{public, other}); len(got) > 0 {
		t.Errorf("of public packages: got %v, which their own records have", got)
	}
}

// The maximum is allowed, and one more identifier is an error with the number, the maximum and the remedy.
func TestTooMany(t *testing.T) {
	expect.Error(t, tooMany(600), nil, "600 identifiers")
	err := tooMany(601)
	must.Be(t, err != nil, "601 identifiers: got no error")
	expect.Texts(t, err.Error(), []string{"601 identifiers", "1 more than the maximum of 600", "unexport", "-count"})
}

// Every public package has an Example, which pkg.go.dev shows.
func TestEveryPackageHasAnExample(t *testing.T) {
	t.Chdir("../../..")
	paths := must.Get(public())(t)
	for _, path := range paths {
		dir := strings.TrimPrefix(path, module+"/")
		files := must.Get(filepath.Glob(dir + "/*_test.go"))(t)
		if !slices.ContainsFunc(files, func(file string) bool {
			text, err := os.ReadFile(file)
			return err == nil && bytes.Contains(text, []byte("\nfunc Example"))
		}) {
			t.Errorf("%s has no Example", dir)
		}
	}
}

// The document maps every field of Spec and Profile to what it permits.
func TestEveryFieldIsMapped(t *testing.T) {
	text := must.Get(os.ReadFile("../../../" + document))(t)
	_, section, _ := strings.Cut(string(text), "## What a run may access")
	section, _, _ = strings.Cut(section, "\n## ")
	for _, s := range []any{sandbox.Spec{}, sandbox.Profile{}, sandbox.Root{}, sandbox.Lower{}} {
		for _, f := range reflect.VisibleFields(reflect.TypeOf(s)) {
			if name := f.Name; !strings.Contains(section, "`"+name+"`") && name != "Source" && name != "Target" {
				t.Errorf("%s does not mention %s of %T", document, name, s)
			}
		}
	}
}
