// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// TestEveryDialShowsWhoCalls: no command dials a server without the credentials of package identity.
func TestEveryDialShowsWhoCalls(t *testing.T) {
	calls := []string{"grpc.NewClient(", "remote.Dial(", "remote.New(", "transport.Dial(", "load.Dial(", ".DialStore("}
	dials := 0
	for _, pattern := range []string{"*.go", "internal/*/*.go", "../cloister-bench/*.go"} {
		files, err := filepath.Glob(pattern)
		must.Be(t, err == nil && len(files) != 0, "%s: got %v, %v", pattern, files, err)
		for _, name := range files {
			text := must.Get(os.ReadFile(name))(t)
			for line := range strings.Lines(string(text)) {
				if strings.HasSuffix(name, "_test.go") || !slices.ContainsFunc(calls, func(c string) bool { return strings.Contains(line, c) }) {
					continue
				}
				local := strings.HasPrefix(name, "internal/diskctl/") // a socket that only its owner can open
				if dials++; !local && !strings.Contains(line, "options...") && !strings.Contains(line, "Identity.Credentials()") {
					t.Errorf("%s: %s: dials without the credentials of identity.Flags", name, strings.TrimSpace(line))
				}
			}
		}
	}
	expect.That(t, dials >= 5, "found %d dials, want 5 or more", dials)
}

// A document is a file for people: README.md, CONTRIBUTING.md, SECURITY.md and what is in docs, without the records of
// decisions, which say what was true at their date.
type document struct{ path, text string }

func documents(t *testing.T) []document {
	t.Helper()
	var all []document
	for _, pattern := range []string{"../../*.md", "../../docs/*.md", "../../examples/*/*.md"} {
		paths, err := filepath.Glob(pattern)
		must.Be(t, err == nil && len(paths) != 0, "%s: %v, %v", pattern, paths, err)
		for _, path := range paths {
			all = append(all, document{path, string(must.Get(os.ReadFile(path))(t))})
		}
	}
	return all
}

// commands calls visit with each command that a person can type; that for the completion of shells is the library's.
func commands(visit func(*cobra.Command)) {
	var below func(*cobra.Command)
	below = func(cmd *cobra.Command) {
		if cmd.Hidden || cmd.Name() == "completion" {
			return
		}
		visit(cmd)
		for _, c := range cmd.Commands() {
			below(c)
		}
	}
	below(rootCommand())
}

// typed finds where a line of a block has cloister executed, from which on it is a command line of ours.
var typed = regexp.MustCompile(`(?:^|[|;&(] *)(?:\$ )?(?:sudo -u cloister )?(?:bin/)?cloister ([^|;&#]*)`)

// quoted is what a shell takes for one word.
var quoted = regexp.MustCompile(`'[^']*'|"[^"]*"`)

// unquote returns a line in which that is one word without quotes, and means nothing to a shell.
func unquote(line string) string {
	return quoted.ReplaceAllStringFunc(line, func(s string) string {
		return strings.Map(func(r rune) rune {
			if strings.ContainsRune(" |;&#()", r) {
				return '_'
			}
			return r
		}, s[1:len(s)-1])
	})
}

// fits says what is wrong with a command line, or "".
func fits(line string) string {
	words, _, _ := strings.Cut(line, " -- ")
	cmd, rest, err := rootCommand().Find(strings.Fields(words))
	if err != nil {
		return err.Error()
	}
	if slices.Contains(rest, "...") { // some are left out
		rest = rest[:slices.Index(rest, "...")]
	}
	if err := cmd.ParseFlags(rest); err != nil {
		return err.Error()
	}
	if err := cmd.ValidateArgs(cmd.Flags().Args()); err != nil {
		return err.Error()
	}
	return ""
}

// TestCommandsOfDocuments: command lines in the blocks of documents, and in the examples of --help, are such that they
// can be typed: commands and flags exist, and values and arguments have the form that they must.
func TestCommandsOfDocuments(t *testing.T) {
	texts := documents(t)
	for i := range texts {
		blocks := strings.Split(texts[i].text, "```")
		texts[i].text = ""
		for n := 1; n < len(blocks); n += 2 {
			texts[i].text += blocks[n]
		}
	}
	commands(func(cmd *cobra.Command) {
		texts = append(texts, document{cmd.CommandPath() + " --help", cmd.Example})
	})
	lines := 0
	for _, d := range texts {
		for line := range strings.Lines(strings.ReplaceAll(d.text, "\\\n", " ")) {
			for _, m := range typed.FindAllStringSubmatch(unquote(strings.TrimSpace(line)), -1) {
				lines++
				expect.Equal(t, fits(m[1]), "", "%s: cloister %s", d.path, m[1])
			}
		}
	}
	expect.That(t, lines >= 180, "%d command lines were found: the documents have more", lines)
}

// TestFlagsOfDocuments: each flag is named in a document, and has a text in --help.
func TestFlagsOfDocuments(t *testing.T) {
	named := map[string]bool{}
	for _, d := range documents(t) {
		for _, m := range regexp.MustCompile(`--([a-z][a-z0-9-]*[a-z0-9])`).FindAllStringSubmatch(d.text, -1) {
			named[m[1]] = true
		}
	}
	commands(func(cmd *cobra.Command) {
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			switch {
			case f.Name == "help" || f.Hidden:
			case !named[f.Name]:
				t.Errorf("%s --%s (%s): no document names it", cmd.CommandPath(), f.Name, f.Usage)
			case f.Usage == "":
				t.Errorf("%s --%s: --help does not say what it is", cmd.CommandPath(), f.Name)
			case strings.Contains(f.Usage, "likewise"): // flags are sorted by name
				t.Errorf("%s --%s: --help refers to another line: %s", cmd.CommandPath(), f.Name, f.Usage)
			}
		})
		for line := range strings.Lines(cmd.LocalFlags().FlagUsages()) {
			if strings.Count(line, "(default") > 1 || strings.Contains(line, "(default 0 B)") || strings.Contains(line, "(default 0s)") {
				t.Errorf("%s --help tells a default that is none: %s", cmd.CommandPath(), line)
			}
		}
	})
}

// TestConfigurationsOfDocuments: the configurations in docs/configuration.md are valid.
func TestConfigurationsOfDocuments(t *testing.T) {
	text := string(must.Get(os.ReadFile("../../docs/configuration.md"))(t))
	blocks := regexp.MustCompile("(?ms)^ *```yaml\n(.*?)^ *```$").FindAllStringSubmatch(text, -1)
	for _, m := range blocks {
		file := filepath.Join(t.TempDir(), "config.yaml")
		must.Succeed(t, os.WriteFile(file, []byte(m[1]), 0o600))
		got, code := runCLI(t, "config", "validate", file)
		expect.That(t, code == 0, "exit %d, %s:\n%s", code, got, m[1])
	}
	expect.That(t, len(blocks) >= 2, "found %d configurations, want 2 or more", len(blocks))
}

// TestMetricsOfDocuments: each metric is named in a document, and each that a document names exists.
func TestMetricsOfDocuments(t *testing.T) {
	metric := regexp.MustCompile(`"?\bcloister_[a-z_]*[a-z]\b(\.\.\.|")?`)
	exist := map[string]bool{"cloister_build_info": true} // a library names it after the program
	named := map[string]bool{}
	for _, folder := range []string{"internal/gate", "internal/node", "../../worker/service", "../../worker/telemetry"} {
		paths := must.Get(filepath.Glob(filepath.Join(folder, "*.go")))(t)
		for _, path := range paths {
			text := must.Get(os.ReadFile(path))(t)
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			for _, m := range metric.FindAllString(string(text), -1) {
				if strings.HasPrefix(m, `"`) && strings.HasSuffix(m, `"`) {
					exist[strings.Trim(m, `"`)] = true
				}
			}
		}
	}
	for _, d := range documents(t) {
		for _, m := range metric.FindAllString(d.text, -1) {
			if m = strings.Trim(m, `"`); !exist[m] {
				t.Errorf("%s: there is no metric %s", d.path, m)
			}
			named[m] = true
		}
	}
	for m := range exist {
		expect.That(t, named[m], "no document says what the metric %s is", m)
	}
	expect.That(t, len(exist) >= 30, "%d metrics were found: there are more", len(exist))
}

// TestLinksOfDocuments: what a document refers to by a path exists, with the heading that it names.
func TestLinksOfDocuments(t *testing.T) {
	blocks := regexp.MustCompile("(?s)```.*?```")
	headings := func(path string) map[string]bool {
		text := must.Get(os.ReadFile(path))(t)
		all := map[string]bool{}
		for _, m := range regexp.MustCompile(`(?m)^#+ +(.*)$`).FindAllStringSubmatch(blocks.ReplaceAllString(string(text), ""), -1) {
			name := strings.ToLower(regexp.MustCompile(`[^\w\- ]`).ReplaceAllString(m[1], ""))
			all[strings.ReplaceAll(name, " ", "-")] = true
		}
		return all
	}
	links := 0
	for _, d := range documents(t) {
		for _, m := range regexp.MustCompile(`\]\(([^)\s]+)\)`).FindAllStringSubmatch(blocks.ReplaceAllString(d.text, ""), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			links++
			file, heading, _ := strings.Cut(m[1], "#")
			path := filepath.Join(filepath.Dir(d.path), file)
			if file == "" {
				path = d.path
			}
			if _, err := os.Stat(path); err != nil {
				t.Errorf("%s refers to %s, which does not exist", d.path, m[1])
			} else if heading != "" && !headings(path)[heading] {
				t.Errorf("%s refers to %s, which has no such heading", d.path, m[1])
			}
		}
	}
	expect.That(t, links >= 100, "%d links were found: the documents have more", links)
}
