// SPDX-License-Identifier: Apache-2.0

package tests

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestBackendTableNamesTests checks that docs/backends.md has a cell for each backend in each row, and that the tests,
// cases and attacks that it names exist.
func TestBackendTableNamesTests(t *testing.T) {
	text := string(must.Get(os.ReadFile(filepath.Join(root, "docs", "backends.md")))(t))
	exists := map[string]bool{}
	contract := regexp.MustCompile(`(?m)^\t\t\{"(\w+)", `)
	attack := regexp.MustCompile(`"([a-z-]+)"`)
	sources(t, func(file, text string) {
		file = filepath.ToSlash(file)
		all := func(names *regexp.Regexp) {
			for _, m := range names.FindAllStringSubmatch(text, -1) {
				exists[m[1]] = true
			}
		}
		switch {
		case strings.HasSuffix(file, "sandboxtest/sandboxtest.go"):
			all(contract)
		case strings.Contains(file, "tests/escape/"):
			all(attack)
		}
		if strings.HasSuffix(file, "_test.go") {
			all(testFunction)
		}
	}, ".go")
	named := regexp.MustCompile(`\*([a-z][a-z-]+)\*|\b((?:[A-Z][a-z]+){3,}\w*|Test[A-Z]\w+)\b`)
	rows := 0
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "| ") {
			continue
		}
		rows++
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		expect.Equal(t, len(cells), 7, "cells of %.40s", line)
		for _, cell := range cells[1:] {
			expect.That(t, strings.TrimSpace(cell) != "", "an empty cell in %.40s", line)
			for _, m := range named.FindAllStringSubmatch(strings.ReplaceAll(cell, "**", ""), -1) {
				name := m[1] + m[2]
				expect.That(t, exists[name], "%.40s names %s, which does not exist", line, name)
			}
		}
	}
	expect.That(t, rows > 20, "got %d rows", rows)
}
