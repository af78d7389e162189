// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

var update = flag.Bool("update", false, "update testdata")

// golden compares got with a file of testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	if *update {
		must.Succeed(t, os.WriteFile("testdata/"+name, []byte(got), 0o666))
	}
	want := must.Get(os.ReadFile("testdata/" + name))(t)
	expect.That(t, got == string(want), "got\n%s\nwant testdata/%s\n%s", got, name, want)
}

// mistakes are malformed policies; testdata/mistakes.txt has the error for each.
var mistakes = []struct{ name, text string }{
	{"empty file", ""},
	{"only a comment", "# nothing\n"},
	{"not UTF-8", "version: 1\n\xff\n"},
	{"no version", "rules: []\n"},
	{"another version", "version: 2\n"},
	{"two documents", "version: 1\n---\nversion: 1\n"},
	{"a list", "- version: 1\n"},
	{"a misspelt key", "version: 1\nprofile:\n  build: {}\n"},
	{"a misspelt setting", "version: 1\nprofiles:\n  build:\n    memry: 8GiB\n"},
	{"an unknown key", "version: 1\nprofiles: {build: {privileged: true}}\n"},
	{"the name of a property as a key", "version: 1\nprofiles: {build: {open-files: 1}}\n"},
	{"a duplicate key", "version: 1\nprofiles:\n  build: {tmp: 1GiB, tmp: 2GiB}\n"},
	{"malformed YAML", "version: 1\nprofiles: [\n"},
	{"an anchor", "version: 1\nprofiles: {build: &a {tmp: 1GiB}, test: *a}\n"},
	{"a merge", "version: 1\nprofiles:\n  build:\n    <<: {tmp: 1GiB}\n"},
	{"a tag", "version: 1\nprofiles: {build: {tmp: !!str 1GiB}}\n"},
	{"a block scalar", "version: 1\nprofiles:\n  build:\n    tmp: |\n      1GiB\n"},
	{"a profile without a value", "version: 1\nprofiles:\n  build:\n  test: {}\n"},
	{"an invalid profile name", "version: 1\nprofiles: {a b: {}}\n"},
	{"a size without a unit", "version: 1\nprofiles: {build: {memory: 4096}}\n"},
	{"a size that overflows", "version: 1\nprofiles: {build: {memory: 9000000TiB}}\n"},
	{"a size below the minimum", "version: 1\nprofiles: {build: {memory: 1MiB}}\n"},
	{"a number below the minimum", "version: 1\nprofiles:\n  build:\n    open_files: 15\n"},
	{"a size of /tmp below the minimum", "version: 1\nprofiles: {a: {tmp: 4KiB}}\n"},
	{"a size above the maximum", "version: 1\nrules: [{name: a, max: {tmp: 1025TiB}}]\n"},
	{"a number above the maximum", "version: 1\nrules: [{name: a, max: {output_files: 1073741825}}]\n"},
	{"a duration above the maximum", "version: 1\nprofiles: {build: {cpu: 87601h}}\n"},
	{"a timeout above the maximum", "version: 1\nprofiles: {build: {max_timeout: 87601h}}\n"},
	{"a duration without a unit", "version: 1\nprofiles: {build: {cpu: 1}}\n"},
	{"a negative duration", "version: 1\nprofiles: {build: {max_timeout: -1s}}\n"},
	{"zero processes", "version: 1\nprofiles: {build: {processes: 0}}\n"},
	{"an invalid boolean", "version: 1\nprofiles: {build: {listen: yes}}\n"},
	{"an invalid audit level", "version: 1\nprofiles: {build: {audit: some}}\n"},
	{"an endpoint without a port", "version: 1\nprofiles:\n  build:\n    network:\n      allow:\n        - example.org\n"},
	{"an endpoint that is a mapping", "version: 1\nprofiles: {a: {network: {allow: [example.org: 443]}}}\n"},
	{"endpoints as a scalar", "version: 1\nprofiles: {a: {network: {allow: example.org:443}}}\n"},
	{"a misspelt key of network", "version: 1\nprofiles: {a: {network: {alow: []}}}\n"},
	{"an unknown parent", "version: 1\nprofiles: {java: {inherits: biuld}}\n"},
	{"a built-in profile that inherits", "version: 1\nprofiles: {test: {inherits: build}}\n"},
	{"an inheritance cycle", "version: 1\nprofiles:\n  a: {inherits: b}\n  b: {inherits: c}\n  c: {inherits: a}\n"},
	{"a profile that inherits from itself", "version: 1\nprofiles: {a: {inherits: a}}\n"},
	{"listening without loopback", "version: 1\nprofiles: {a: {loopback: false, listen: true}}\n"},
	{"listening without the parent's loopback", "version: 1\nprofiles: {b: {inherits: a, listen: true}, a: {loopback: false}}\n"},
	{"endpoints of a parent without loopback", "version: 1\nprofiles:\n  a: {network: {allow: [example.org:443]}}\n  b: {inherits: a, loopback: false}\n"},
	{"endpoints without loopback", "version: 1\nprofiles:\n  a:\n    loopback: false\n    network: {allow: [example.org:443]}\n"},
	{"an unknown level", "version: 1\nprofiles:\n  a: {on_violation: abort}\n"},
	{"an unknown level of a kind", "version: 1\nprofiles:\n  a:\n    on_violation:\n      network: true\n"},
	{"an unknown kind of violation", "version: 1\nprofiles:\n  a: {on_violation: {networks: fail}}\n"},
	{"a list of levels", "version: 1\nprofiles:\n  a: {on_violation: [network, write]}\n"},
	{"a rule without a name", "version: 1\nrules:\n  - profile: build\n"},
	{"a duplicate rule name", "version: 1\nrules:\n  - {name: a, when: {mnemonic: A}}\n  - {name: a}\n"},
	{"a rule called default", "version: 1\nrules: [{name: default}]\n"},
	{"an invalid rule name", "version: 1\nrules: [{name: \"a\\nb\"}]\n"},
	{"an unknown profile", "version: 1\nprofiles: {fetch: {}}\nrules:\n  - {name: a, profile: fecth}\n"},
	{"an unreachable rule", "version: 1\nrules:\n  - {name: a}\n  - {name: b}\n"},
	{"a misspelt condition", "version: 1\nrules: [{name: a, when: {mnemonics: A}}]\n"},
	{"a condition without a value", "version: 1\nrules:\n  - name: a\n    when:\n    profile: build\n"},
	{"an invalid target pattern", "version: 1\nrules: [{name: a, when: {target: \"third_party/...\"}}]\n"},
	{"an unknown key of max", "version: 1\nrules: [{name: a, max: {listen: true}}]\n"},
	{"max below the profile", "version: 1\nprofiles:\n  build: {memory: 8GiB}\nrules:\n  - name: a\n    profile: build\n    max: {processes: 256, memory: 4GiB}\n"},
	{"max below a built-in profile", "version: 1\nrules:\n  - name: a\n    max: {processes: 256}\n"},
	{"max below a profile without a limit", "version: 1\nrules: [{name: a, max: {cpus: 2}}]\n"},
	{"a quantity that is not a limit", "version: 1\nallow_unenforced: [memory, tmp]\n"},
	{"a misspelt limit", "version: 1\nallow_unenforced: [open-files]\n"},
	{"a registry with a scheme", "version: 1\nimages: {registries: [\"https://registry.example\"]}\n"},
	{"an image size below the minimum", "version: 1\nimages: {max_size: 1KiB}\n"},
	{"an unknown key of images", "version: 1\nimages: {registry: [a.example]}\n"},
	{"a sandbox that is no stronger than another", "version: 1\nsandboxes: [{require: namespace}]\n"},
	{"a sandbox without a boundary", "version: 1\nsandboxes:\n  - require: qemu-tcg\n"},
	{"a rule that requires no sandbox", "version: 1\nsandboxes:\n  - when: {instance: main}\n"},
	{"a sandbox by property", "version: 1\nsandboxes: [{require: gvisor, when: {property: {a: b}}}]\n"},
	{"a position far below", "version: 1\n" + strings.Repeat("\n", 998) + "\tx: 1\n"},
	{"terminal control characters", "version: 1 # \x1b[2J \u00e9\nprofiles: {\"\x1b[31m\": {}}\n"},
}

func TestParseExplainsMistakes(t *testing.T) {
	var b strings.Builder
	for _, c := range mistakes {
		p, err := policy.Parse("policy.yaml", []byte(c.text))
		if _, ok := errors.AsType[*policy.SyntaxError](err); !ok {
			t.Errorf("%s: got %v, %v; want a SyntaxError", c.name, p, err)
			continue
		}
		b.WriteString("== " + c.name + "\n" + err.Error() + "\n")
	}
	golden(t, "mistakes.txt", b.String())
}

func TestParseRefusesLargeFiles(t *testing.T) {
	text := "version: 1\n" + strings.Repeat("# nothing\n", 7000)
	expect.Message(t, expect.Err(policy.Parse("policy.yaml", []byte(text))), "at most 65536", "a file of 70 kB")
}

func TestParseReadsTheExample(t *testing.T) {
	text := must.Get(os.ReadFile("../../examples/policy.yaml"))(t)
	p := must.Get(policy.Parse("policy.yaml", text))(t)
	golden(t, "example.txt", p.Text())
}

// TestDocumentation parses every policy in the document, and compares the one with the built-in values.
func TestDocumentation(t *testing.T) {
	doc := must.Get(os.ReadFile("../../docs/policy.md"))(t)
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllSubmatch(doc, -1)
	must.Be(t, len(blocks) >= 3, "got %d blocks of YAML, want at least 3", len(blocks))
	for _, b := range blocks {
		expect.Error(t, expect.Err(policy.Parse("policy.md", b[1])), nil)
	}
	if !strings.Contains(string(doc), policy.Default().Text()) {
		t.Errorf("docs/policy.md lacks the built-in profiles:\n%s", policy.Default().Text())
	}
}

func TestParseAcceptsMaximumAmounts(t *testing.T) {
	const all = "memory: 1024TiB, cpu: 87600h, processes: 1073741824, open_files: 1073741824, output_bytes: 1024TiB, output_files: 1073741824, tmp: 1024TiB"
	text := parse(t, "version: 1\nprofiles: {build: {max_timeout: 87600h}}\nrules: [{name: r, max: {"+all+"}}]").Text()
	for _, want := range []string{"max: {" + all + "}", "max_timeout: 87600h"} {
		expect.That(t, strings.Contains(text, want), "got\n%s\nwant %q in it", text, want)
	}
}

func TestHashDependsOnMeaning(t *testing.T) {
	hash := func(text string) string { return parse(t, text).Hash() }
	expect.That(t, hash("version: 1") == policy.Default().Hash(),
		"the hash of an empty policy differs from the default's")
	if hash("version: 1\nprofiles: {b: {tmp: 1024MiB}, a: {}}") != hash("# x\nprofiles:\n  a: {}\n  b: {tmp: 1GiB}\nversion: 1") {
		t.Error("the notation changes the hash")
	}
	const rule = "version: 1\nprofiles: {a: {network: {allow: [%s]}}}\nrules: [{name: r, when: {property: {%s}}}]"
	if hash(fmt.Sprintf(rule, "b:1, a:1, B:1", "y: 1, x: 1")) != hash(fmt.Sprintf(rule, "a:1, b:1", "x: 1, y: 1")) {
		t.Error("the order of endpoints or properties changes the hash")
	}
	expect.That(t, hash("version: 1\nprofiles: {a: {on_violation: fail}}") != hash("version: 1\nprofiles: {a: {}}"),
		"what a violation does is not in the hash")
	// They differ: a worker that cannot enforce a limit of the file refuses.
	expect.That(t, hash("version: 1\nprofiles: {build: {memory: 4GiB}}") != policy.Default().Hash(),
		"a limit in the file has the same hash as a built-in one")
}

func TestTextIsTheSamePolicy(t *testing.T) {
	for _, text := range []string{
		wide,
		"version: 1\nprofiles: {a: {listen: true}, b: {inherits: a, loopback: false}}",
		"version: 1\nprofiles: {\"null\": {}, \"true\": {}, 1e3: {inherits: test}}\nrules: [{name: \"Null\", profile: \"null\"}]",
		"version: 1\nrules: [{name: a, when: {mnemonic: \"x: \\n\\u00e9\", instance: \"\", property: {\"a b\": \"#\"}}}]",
		"version: 1\nallow_unenforced: [output_files, cpu, cpu]",
		"version: 1\nsandboxes: [{require: qemu}, {require: gvisor, when: {target: //a, mnemonic: x, instance: \"\"}}]",
		"version: 1\nprofiles: {build: {on_violation: kill}, a: {on_violation: {network: fail, read: report}}, b: {inherits: a, on_violation: {write: fail}}}",
	} {
		p := parse(t, text)
		if again := parse(t, p.Text()); again.Text() != p.Text() {
			t.Errorf("got\n%s\nwant\n%s", again.Text(), p.Text())
		}
	}
}

func parse(t *testing.T, text string) *policy.Policy {
	t.Helper()
	p := must.Get(policy.Parse("policy.yaml", []byte(text)))(t)
	return p
}

func compile(t *testing.T, p *policy.Policy, r policy.Request) *policy.Grant {
	t.Helper()
	g := must.Get(p.Compile(r, sandbox.AllLimits))(t)
	return g
}
