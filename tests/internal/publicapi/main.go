// SPDX-License-Identifier: Apache-2.0

// Package main checks the public API: the exported identifiers of the packages that docs/library.md lists, a line each,
// against the record in .ci/api.txt. The record also has the fields of other structs of the module that these
// packages expose. With -update it writes the record, with -count it counts. In every case it fails if the packages
// export more than maxIdentifiers.
//
// It reads the compiler's export data for Linux, so it sees types as the compiler does, on every host alike.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
)

const (
	module   = "github.com/cloister-build/cloister"
	record   = ".ci/api.txt"
	document = "docs/library.md"

	// maxIdentifiers is the number of identifiers that the packages may export together, as identifiers counts them: an
	// API that a reader can survey.
	maxIdentifiers = 600
)

func main() {
	update := flag.Bool("update", false, "write the record")
	count := flag.Bool("count", false, "print the number of exported identifiers of each package, without fields and methods of interfaces")
	flag.Parse()
	if err := run(*update, *count); err != nil {
		fmt.Fprintln(os.Stderr, "publicapi:", err)
		os.Exit(1)
	}
}

// run expects the root of the module as the working directory.
func run(update, count bool) error {
	paths, err := public()
	if err != nil {
		return err
	}
	packages, err := load(paths)
	if err != nil {
		return err
	}
	var text strings.Builder
	total := 0
	for _, p := range packages {
		lines := describe(p)
		for _, line := range lines {
			text.WriteString(line + "\n")
		}
		n := identifiers(lines)
		if total += n; count {
			fmt.Printf("%4d %s\n", n, relative(p))
		}
	}
	for _, line := range exposed(packages) {
		text.WriteString(line + "\n")
	}
	if count {
		fmt.Printf("%4d in %d packages\n", total, len(packages))
	}
	if err := tooMany(total); err != nil || count {
		return err
	}
	if update {
		return os.WriteFile(record, []byte(text.String()), 0o644)
	}
	want, err := os.ReadFile(record)
	if err != nil {
		return err
	}
	if diff := difference(string(want), text.String()); diff != "" {
		return fmt.Errorf("the public API is not the one in %s:\n%sif the change is deliberate, run make api and commit the record", record, diff)
	}
	return nil
}

var (
	interfaceType = regexp.MustCompile(`: type (\w+).* interface`)
	methodOf      = regexp.MustCompile(`: method \((\w+)\)`)
)

// identifiers counts the lines without fields and methods of interfaces, which belong to their types.
func identifiers(lines []string) int {
	interfaces := map[string]bool{}
	n := 0
	for _, line := range lines { // a type precedes its methods
		if m := interfaceType.FindStringSubmatch(line); m != nil {
			interfaces[m[1]] = true
		}
		if m := methodOf.FindStringSubmatch(line); strings.Contains(line, ": field ") || m != nil && interfaces[m[1]] {
			continue
		}
		n++
	}
	return n
}

// tooMany fails if the public packages export more than maxIdentifiers.
func tooMany(identifiers int) error {
	if identifiers <= maxIdentifiers {
		return nil
	}
	return fmt.Errorf("the public packages export %d identifiers, %d more than the maximum of %d; unexport those that no "+
		"importer needs (-count lists the packages)", identifiers, identifiers-maxIdentifiers, maxIdentifiers)
}

var row = regexp.MustCompile("(?m)^\\| `((?:access|cas|sandbox|worker)[a-z/]*)` \\|")

// public returns the paths of the packages that the tables of the document list.
func public() ([]string, error) {
	text, err := os.ReadFile(document)
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, m := range row.FindAllSubmatch(text, -1) {
		paths = append(paths, module+"/"+string(m[1]))
	}
	slices.Sort(paths)
	if paths = slices.Compact(paths); len(paths) == 0 {
		return nil, errors.New(document + " lists no packages")
	}
	return paths, nil
}

// load returns packages, which must compile.
func load(paths []string) ([]*types.Package, error) {
	list := exec.Command("go", append([]string{"list", "-export", "-deps", "-json=ImportPath,Export"}, paths...)...)
	list.Env = append(os.Environ(), "GOOS=linux", "GOARCH=amd64", "CGO_ENABLED=0")
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	export := map[string]string{}
	for d := json.NewDecoder(bytes.NewReader(out)); d.More(); {
		var p struct{ ImportPath, Export string }
		if err := d.Decode(&p); err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		export[p.ImportPath] = p.Export
	}
	imports := importer.ForCompiler(token.NewFileSet(), "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(export[path])
	})
	packages := make([]*types.Package, len(paths))
	for i, path := range paths {
		if packages[i], err = imports.Import(path); err != nil {
			return nil, err
		}
	}
	return packages, nil
}

// difference lists the lines that only one of two texts has.
func difference(want, got string) string {
	var diff strings.Builder
	only := func(sign, in, out string) {
		known := map[string]bool{}
		for line := range strings.Lines(out) {
			known[line] = true
		}
		for line := range strings.Lines(in) {
			if !known[line] {
				diff.WriteString(sign + " " + line)
			}
		}
	}
	only("-", want, got)
	only("+", got, want)
	return diff.String()
}

// relative returns the path of a package below the module, or the name of a foreign one.
func relative(p *types.Package) string {
	if path, ok := strings.CutPrefix(p.Path(), module+"/"); ok {
		return path
	}
	return p.Name()
}
