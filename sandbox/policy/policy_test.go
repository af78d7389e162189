// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

func properties(kv ...string) []policy.Property {
	var ps []policy.Property
	for _, s := range kv {
		k, v, _ := strings.Cut(s, "=")
		ps = append(ps, policy.Property{Name: k, Value: v})
	}
	return ps
}

func TestDefaultGrants(t *testing.T) {
	build := compile(t, policy.Default(), policy.Request{})
	if build.Profile != "build" || build.Rule != "default" || build.Limits != sandbox.DefaultLimits() ||
		!build.Network.Loopback || !build.Network.Listen || build.TempBytes != 4<<30 || build.MaxTimeout != 0 ||
		!build.Cache || !build.Hermetic || build.Audit != sandbox.AuditViolations {
		t.Errorf("got %+v", build)
	}
	limits := sandbox.DefaultLimits()
	limits.Processes = 1024
	test := compile(t, policy.Default(), policy.Request{Mnemonic: "TestRunner"})
	expect.That(t, test.Profile == "test" && test.Limits == limits && test.TempBytes == 8<<30 && test.Network.Listen,
		"got %+v", test)
}

// wide is a policy that sets every key of a profile to something other than the default.
const wide = `version: 1
profiles:
  wide:
    memory: 5GiB
    cpu: 2h
    processes: 200
    open_files: 5000
    output_bytes: 17GiB
    output_files: 2000000
    cpus: 1.5
    disk_rate: 80MiB/s
    tmp: 6GiB
    max_timeout: 3h
    loopback: true
    listen: false
    audit: full
    on_violation: {network: kill, write: fail, limit: report}
    network: {allow: [b.example.org:443, a.example.org:443, A.example.org:443], cache: true}
  child: {inherits: wide, memory: 6GiB}
  mute: {loopback: false, audit: off}
  once: {network: {allow: [10.0.0.1:80]}}
  strict: {inherits: wide, on_violation: {syscall: kill}, audit: off}
  all: {on_violation: fail, audit: off}
rules:
  - {name: mute, when: {instance: mute}, profile: mute}
  - {name: once, when: {instance: once}, profile: once}
  - {name: child, when: {instance: child}, profile: child}
  - {name: strict, when: {instance: strict}, profile: strict}
  - {name: all, when: {instance: all}, profile: all}
  - name: wide
    when: {instance: wide}
    profile: wide
    max: {memory: 50GiB, cpu: 20h, processes: 2000, open_files: 50000, output_bytes: 170GiB, output_files: 20000000, cpus: 2, disk_rate: 800MiB/s, tmp: 60GiB}
`

// counted returns what a grant says about violations, and the audit level.
func counted(g *policy.Grant) any { return fmt.Sprint(g.Fail, g.Kill, " ", g.Audit.String()) }

func TestCompileGrants(t *testing.T) {
	p := parse(t, wide)
	for _, c := range []struct {
		instance, asks string
		says           func(g *policy.Grant) any
		want           any
	}{
		{"wide", "", func(g *policy.Grant) any { return g.Limits }, sandbox.Limits{
			Memory: 5 << 30, CPU: 2 * time.Hour, Processes: 200, OpenFiles: 5000, OutputBytes: 17 << 30, OutputFiles: 2000000,
			MilliCPUs: 1500, DiskRate: 80 << 20,
		}},
		{"wide", "", func(g *policy.Grant) any { return g.TempBytes }, int64(6 << 30)},
		{"wide", "", func(g *policy.Grant) any { return g.MaxTimeout }, 3 * time.Hour},
		{"wide", "", func(g *policy.Grant) any { return fmt.Sprint(g.Network) }, "{true false []}"},
		{"wide", "", func(g *policy.Grant) any { return g.Audit }, sandbox.AuditFull},
		{"wide", "", func(g *policy.Grant) any { return g.Hermetic }, true},
		{"wide", "", func(g *policy.Grant) any { return g.Profile + " " + g.Rule }, "wide wide"},
		{"child", "", func(g *policy.Grant) any {
			return fmt.Sprint(g.Limits.Memory>>30, g.Limits.Processes, g.Network.Listen)
		}, "6 200 false"},
		{"mute", "", func(g *policy.Grant) any { return g.Audit }, sandbox.AuditOff},
		{"mute", "", func(g *policy.Grant) any { return fmt.Sprint(g.Network) }, "{false false []}"},
		// Properties up to max.
		{"wide", "cloister-memory=50GiB", func(g *policy.Grant) any { return g.Limits.Memory }, int64(50 << 30)},
		// Minimum amounts.
		{"", "cloister-memory=16MiB", func(g *policy.Grant) any { return g.Limits.Memory }, int64(16 << 20)},
		{"", "cloister-cpu=1ns", func(g *policy.Grant) any { return g.Limits.CPU }, time.Duration(1)},
		{"", "cloister-processes=1", func(g *policy.Grant) any { return g.Limits.Processes }, int64(1)},
		{"", "cloister-open-files=16", func(g *policy.Grant) any { return g.Limits.OpenFiles }, int64(16)},
		{"", "cloister-output-bytes=1B", func(g *policy.Grant) any { return g.Limits.OutputBytes }, int64(1)},
		{"", "cloister-output-files=1", func(g *policy.Grant) any { return g.Limits.OutputFiles }, int64(1)},
		{"", "cloister-tmp=1MiB", func(g *policy.Grant) any { return g.TempBytes }, int64(1 << 20)},
		{"", "cloister-cpus=0.01", func(g *policy.Grant) any { return g.Limits.MilliCPUs }, int64(10)},
		{"", "cloister-cpus=1000", func(g *policy.Grant) any { return g.Limits.MilliCPUs }, int64(1_000_000)},
		{"wide", "cloister-cpus=2.000", func(g *policy.Grant) any { return g.Limits.MilliCPUs }, int64(2000)},
		{"child", "cloister-cpus=1", func(g *policy.Grant) any { return g.Limits.MilliCPUs }, int64(1000)},
		{"", "cloister-disk-rate=1MB/s", func(g *policy.Grant) any { return g.Limits.DiskRate }, int64(1e6)},
		{"wide", "cloister-cpu=20h", func(g *policy.Grant) any { return g.Limits.CPU }, 20 * time.Hour},
		{"wide", "cloister-processes=2000", func(g *policy.Grant) any { return g.Limits.Processes }, int64(2000)},
		{"wide", "cloister-open-files=50000", func(g *policy.Grant) any { return g.Limits.OpenFiles }, int64(50000)},
		{"wide", "cloister-output-bytes=170GiB", func(g *policy.Grant) any { return g.Limits.OutputBytes }, int64(170 << 30)},
		{"wide", "cloister-output-files=20000000", func(g *policy.Grant) any { return g.Limits.OutputFiles }, int64(20000000)},
		{"wide", "cloister-tmp=60GiB", func(g *policy.Grant) any { return g.TempBytes }, int64(60 << 30)},
		{"child", "cloister-memory=6GiB", func(g *policy.Grant) any { return g.Limits.Memory }, int64(6 << 30)},
		// Endpoints, in the order of a Spec and without duplicates.
		{
			"wide", "cloister-network=b.example.org:443, A.example.org:443 cloister-network=b.example.org:443",
			func(g *policy.Grant) any { return fmt.Sprint(g.Network.Allow) }, "[a.example.org:443 b.example.org:443]",
		},
		{"wide", "cloister-network=a.example.org:443", func(g *policy.Grant) any { return fmt.Sprint(g.Hermetic, g.Cache) }, "false true"},
		{"once", "cloister-network=10.0.0.1:80", func(g *policy.Grant) any { return fmt.Sprint(g.Hermetic, g.Cache) }, "false false"},
		{"once", "", func(g *policy.Grant) any { return fmt.Sprint(g.Hermetic, g.Cache) }, "true true"},
		// What other servers call the standard network is what the profile allows.
		{
			"wide", "DockerNetwork=Standard", func(g *policy.Grant) any { return fmt.Sprint(g.Network.Allow, g.Hermetic, g.Cache) },
			"[a.example.org:443 b.example.org:443] false true",
		},
		{"wide", "dockerNetwork=standard cloister-network=b.example.org:443", func(g *policy.Grant) any { return fmt.Sprint(g.Network.Allow) }, "[b.example.org:443]"},
		{"wide", "dockerNetwork=standard cloister-loopback=false", func(g *policy.Grant) any { return fmt.Sprint(g.Network.Allow, g.Hermetic) }, "[] true"},
		{"wide", "dockerNetwork=standard dockernetwork=off", func(g *policy.Grant) any { return fmt.Sprint(g.Network.Allow, g.Hermetic) }, "[] true"},
		{"wide", "dockerNetwork=off", func(g *policy.Grant) any { return fmt.Sprint(g.Network.Allow, g.Hermetic) }, "[] true"},
		{"", "dockerNetwork=standard", func(g *policy.Grant) any { return fmt.Sprint(g.Network.Allow, g.Hermetic) }, "[] true"},
		// Properties that renounce something.
		{"once", "cloister-listen=false", func(g *policy.Grant) any { return fmt.Sprint(g.Network) }, "{true false []}"},
		{"once", "cloister-loopback=false", func(g *policy.Grant) any { return fmt.Sprint(g.Network) }, "{false false []}"},
		{"once", "cloister-loopback=true cloister-listen=true", func(g *policy.Grant) any { return fmt.Sprint(g.Network) }, "{true true []}"},
		{"once", "cloister-audit=full", func(g *policy.Grant) any { return g.Audit }, sandbox.AuditFull},
		{"once", "cloister-audit=attempts", func(g *policy.Grant) any { return g.Audit }, sandbox.AuditViolations},
		{"mute", "cloister-audit=off", func(g *policy.Grant) any { return g.Audit }, sandbox.AuditOff},
		{"", "cloister-profile=test", func(g *policy.Grant) any { return g.Profile }, "test"},
		{"child", "cloister-profile=child", func(g *policy.Grant) any { return g.Profile }, "child"},
		// Violations: kinds that are not named keep their level, and only limits need no monitor.
		{"", "", counted, "[] [] attempts"},
		{"wide", "", counted, "[write] [connect] full"},
		{"child", "", counted, "[write] [connect] full"},
		{"strict", "", counted, "[write] [connect syscall] attempts"},
		{"all", "", counted, "[connect write read exec syscall limit] [] attempts"},
		{"", "cloister-on-violation=fail", counted, "[connect write read exec syscall limit] [] attempts"},
		{"", "cloister-on-violation=kill", counted, "[] [connect write read exec syscall limit] attempts"},
		{"", "cloister-on-violation=report", counted, "[] [] attempts"},
		{"mute", "", counted, "[] [] off"},
		{"mute", "cloister-on-violation=limit:kill", counted, "[] [limit] off"},
		{"mute", "cloister-on-violation=exec:fail", counted, "[exec] [] attempts"},
		{"", "cloister-on-violation=network:fail, syscall:kill", counted, "[connect] [syscall] attempts"},
		{"wide", "cloister-on-violation=kill", counted, "[] [connect write read exec syscall limit] full"},
		{"wide", "cloister-on-violation=write:kill,read:report", counted, "[] [connect write] full"},
		// Duplicate and foreign properties.
		{"", "cloister-tmp=1GiB cloister-tmp=1GiB", func(g *policy.Grant) any { return g.TempBytes }, int64(1 << 30)},
		{"", "OSFamily=linux Pool=x cloisters.memory=1 Cloister.memory=1", func(g *policy.Grant) any { return g.Profile }, "build"},
	} {
		asked := properties(strings.Fields(strings.ReplaceAll(c.asks, ", ", ","))...)
		if got := c.says(compile(t, p, policy.Request{Instance: c.instance, Properties: asked})); got != c.want {
			t.Errorf("%s %s: got %v, want %v", c.instance, c.asks, got, c.want)
		}
	}
}

func TestCompileRefuses(t *testing.T) {
	p := parse(t, wide)
	var b strings.Builder
	for _, c := range []struct{ instance, asks string }{
		{"", "cloister-memory=64GiB"},
		{"", "cloister-cpu=61m"},
		{"", "cloister-processes=129"},
		{"", "cloister-open-files=4097"},
		{"", "cloister-output-bytes=17GiB"},
		{"", "cloister-output-files=1000001"},
		{"", "cloister-tmp=5GiB"},
		{"wide", "cloister-memory=51GiB"},
		{"wide", "cloister-cpus=2.001"},
		{"child", "cloister-cpus=2"},
		{"wide", "cloister-disk-rate=801MiB/s"},
		{"", "cloister-disk-rate=1023B/s"},
		{"", "cloister-disk-rate=1MiB"},
		{"", "cloister-disk-rate=1/s"},
		{"", "cloister-cpus=0.009"},
		{"", "cloister-cpus=1000.001"},
		{"", "cloister-cpus=1."},
		{"", "cloister-cpus=.5"},
		{"", "cloister-cpus=1.0005"},
		{"", "cloister-cpus=-1"},
		{"", "cloister-cpus=1,5"},
		{"child", "cloister-memory=7GiB"},
		{"", "cloister-memory=lots"},
		{"", "cloister-cpu=-1s"},
		{"", "cloister-processes=0"},
		{"wide", "cloister-memory=16777215B"},
		{"wide", "cloister-open-files=15"},
		{"wide", "cloister-output-bytes=0B"},
		{"wide", "cloister-tmp=1048575B"},
		{"wide", "cloister-memory=1125899906842625B"},
		{"wide", "cloister-cpu=87600h1ns"},
		{"wide", "cloister-processes=1073741825"},
		{"wide", "cloister-open-files=1073741825"},
		{"wide", "cloister-output-bytes=1025TiB"},
		{"wide", "cloister-output-files=1073741825"},
		{"wide", "cloister-tmp=1025TiB"},
		{"", "cloister-memori=1GiB"},
		{"", "cloister-open_files=1"},
		{"", "cloister-privileged=true"},
		{"", "cloister-=1"},
		{"", "cloister-tmp=1GiB cloister-tmp=2GiB"},
		{"", "cloister-profile=wide"},
		{"", "cloister-profile="},
		{"wide", "cloister-profile=build"},
		{"", "cloister-network=example.org:443"},
		{"wide", "cloister-network=a.example.org:443,example.org:443"},
		{"wide", "cloister-network=a.example.org:80"},
		{"wide", "cloister-network=a.example.org"},
		{"wide", "cloister-network=a.example.org:443, cloister-network="},
		{"wide", "cloister-network=a.example.org:443 cloister-loopback=false"},
		{"wide", "cloister-listen=true"},
		{"once", "cloister-listen=true cloister-loopback=false"},
		{"mute", "cloister-loopback=true"},
		{"once", "cloister-loopback=yes"},
		{"wide", "cloister-audit=attempts"},
		{"", "cloister-audit=off"},
		{"", "cloister-audit=some"},
		{"wide", "cloister-on-violation=report"},
		{"wide", "cloister-on-violation=fail"},
		{"wide", "cloister-on-violation=network:fail"},
		{"wide", "cloister-on-violation=write:report,read:kill"},
		{"child", "cloister-on-violation=write:report"},
		{"", "cloister-on-violation=die"},
		{"", "cloister-on-violation="},
		{"", "cloister-on-violation=network:"},
		{"", "cloister-on-violation=net:fail"},
		{"", "cloister-on-violation=network:fail,network:kill"},
		{"", "cloister-on-violation=network:fail,fail"},
		{"", "cloister-on-violation=fail cloister-on-violation=kill"},
		{"", "cloister-\x1b[2J=1"},
		{"", "cloister-memory=" + strings.Repeat("9", 4097)},
	} {
		g, err := p.Compile(policy.Request{Instance: c.instance, Properties: properties(strings.Fields(c.asks)...)}, sandbox.AllLimits)
		var refused *policy.RefusedError
		if !errors.Is(err, policy.ErrRefused) || !errors.As(err, &refused) || refused.Rule != cmp.Or(c.instance, "default") {
			t.Errorf("%s %s: got %+v, %v; want a RefusedError of the rule", c.instance, c.asks, g, err)
			continue
		}
		expect.Equal(t, strings.Count(err.Error(), fmt.Sprintf("rule %q", refused.Rule)), 1, "mentions of the rule in %v", err)
		fmt.Fprintf(&b, "%s\n", err)
	}
	golden(t, "refusals.txt", b.String())
}

// TestSandboxProperty: an action may require a backend; one that does not exist is refused.
func TestSandboxProperty(t *testing.T) {
	ask := func(value string) (*policy.Grant, error) {
		return policy.Default().Compile(policy.Request{Properties: []policy.Property{{Name: "cloister-sandbox", Value: value}}}, sandbox.AllLimits)
	}
	for _, value := range []string{"namespace", "gvisor", "microvm", "qemu", "qemu-tcg", "seatbelt", "jobobject"} {
		if g, err := ask(value); err != nil || g.Sandbox != value || !slices.Contains(g.Why, "sandbox "+value+": property cloister-sandbox") {
			t.Errorf("%s: got %+v, %v", value, g, err)
		}
	}
	if _, err := ask("none"); !errors.Is(err, policy.ErrRefused) || !strings.Contains(err.Error(), "write namespace, gvisor, microvm, qemu, qemu-tcg, seatbelt, jobobject") {
		t.Errorf("none: got %v, want a refusal", err)
	}
	if g, err := policy.Default().Compile(policy.Request{}, sandbox.AllLimits); err != nil || g.Sandbox != "" {
		t.Errorf("without the property: got %+v, %v", g, err)
	}
}

func TestFirstMatchingRuleApplies(t *testing.T) {
	all := policy.Request{Instance: "main", Target: "//a/b:c", Mnemonic: "Fetch", Properties: properties("pool=big", "pool=net", "x=")}
	for _, c := range []struct {
		when  string
		match bool
	}{
		{`{}`, true},
		{`{mnemonic: Fetch}`, true},
		{`{mnemonic: fetch}`, false},
		{`{instance: main}`, true},
		{`{instance: other}`, false},
		{`{instance: ""}`, false},
		{`{property: {pool: net}}`, true},
		{`{property: {pool: big}}`, true},
		{`{property: {pool: small}}`, false},
		{`{property: {pool: net, y: 1}}`, false},
		{`{property: {x: ""}}`, true},
		{`{property: {y: ""}}`, false},
		{`{target: "//a/..."}`, true},
		{`{target: "//b/..."}`, false},
		{`{target: "//a/...", mnemonic: Fetch, instance: main, property: {pool: net}}`, true},
		{`{target: "//x/...", mnemonic: Fetch, instance: main, property: {pool: net}}`, false},
		{`{target: "//a/...", mnemonic: X, instance: main, property: {pool: net}}`, false},
		{`{target: "//a/...", mnemonic: Fetch, instance: x, property: {pool: net}}`, false},
		{`{target: "//a/...", mnemonic: Fetch, instance: main, property: {pool: x}}`, false},
	} {
		p := parse(t, "version: 1\nrules: [{name: r, when: "+c.when+", profile: test}]")
		if g := compile(t, p, all); (g.Rule == "r") != c.match || (g.Profile == "test") != c.match {
			t.Errorf("%s: got rule %s, profile %s", c.when, g.Rule, g.Profile)
		}
	}
	// A rule without a profile keeps the default one.
	p := parse(t, "version: 1\nrules:\n- {name: a, when: {mnemonic: X}}\n- {name: b, when: {instance: main}}\n- {name: c, profile: test}")
	if g := compile(t, p, all); g.Rule != "b" || g.Profile != "build" {
		t.Errorf("got rule %s, profile %s", g.Rule, g.Profile)
	}
	if g := compile(t, p, policy.Request{Instance: "main", Mnemonic: "TestRunner"}); g.Rule != "b" || g.Profile != "test" {
		t.Errorf("got rule %s, profile %s", g.Rule, g.Profile)
	}
}

func TestTargetPatterns(t *testing.T) {
	for _, c := range []struct {
		pattern string
		yes, no []string
	}{
		{"//a/b:c", []string{"//a/b:c", "@//a/b:c", "@@//a/b:c"}, []string{"//a/b:d", "//a/b", "//a/b/c", "@@r//a/b:c", "", "a/b:c", "/a/b:c", "x//a/b:c", "@@@//a/b:c"}},
		{"//a/b", []string{"//a/b:b", "//a/b"}, []string{"//a/b:c"}},
		{"//a:all", []string{"//a:a", "//a:x/y", "//a"}, []string{"//a/b:c", "//:a", "//ab:c"}},
		{"//:x", []string{"//:x"}, []string{"//x", "//x:x"}},
		{"//:all", []string{"//:x"}, []string{"//x", "//x:x"}},
		{"//a/...", []string{"//a:x", "//a/b:c", "//a/b/c:d"}, []string{"//ab:c", "//b/a:c", "@@r//a:x"}},
		{"//...", []string{"//:x", "//a/b:c"}, []string{"@@r//a", "@r//a", ""}},
		{"@@r+//a/...", []string{"@@r+//a:b", "@r+//a/c"}, []string{"//a:b", "@@r//a:b"}},
		{"@r//...", []string{"@@r//:x", "@r//a"}, []string{"//a", "@@rr//a"}},
	} {
		p := parse(t, fmt.Sprintf("version: 1\nrules: [{name: r, when: {target: %q}}]", c.pattern))
		for _, label := range slices.Concat(c.yes, c.no) {
			got := compile(t, p, policy.Request{Target: label}).Rule == "r"
			expect.That(t, got == slices.Contains(c.yes, label),
				"pattern %s, label %q: got match %t", c.pattern, label, got)
		}
	}
	for _, bad := range []string{"", "//", "a", ":a", "//a:", "//a/", "//a//b:c", "//a/../b:c", "//a/.:x", "//a/...:all", "//.../b", "//a:*", "r//a:b", "@@r", "@@@r//a:b", "///...", "//a/b:c/..."} {
		if _, err := policy.Parse("f", fmt.Appendf(nil, "version: 1\nrules: [{name: r, when: {target: %q}}]", bad)); err == nil {
			t.Errorf("the invalid pattern %q was accepted", bad)
		}
	}
}

// A worker ignores a built-in limit that it cannot enforce, but refuses an explicit one.
func TestCompileRefusesUnenforceableLimits(t *testing.T) {
	few := []sandbox.Limit{sandbox.LimitCPU}
	g, err := policy.Default().Compile(policy.Request{}, few)
	must.Succeed(t, err)
	want := sandbox.Limits{Memory: -1, CPU: time.Hour, Processes: -1, OpenFiles: -1, OutputBytes: -1, OutputFiles: -1, MilliCPUs: -1, DiskRate: -1}
	expect.Equal(t, g.Limits, want)
	if !slices.ContainsFunc(g.Why, func(s string) bool { return strings.HasPrefix(s, "memory unlimited: ") }) {
		t.Errorf("Why does not say that memory is unlimited: %q", g.Why)
	}
	asked := policy.Request{Properties: properties("cloister-memory=1GiB")}
	explicit := "version: 1\nprofiles: {build: {memory: 1GiB}}\n"
	for name, c := range map[string]struct {
		text    string
		request policy.Request
	}{
		"a property sets it":                    {"version: 1", asked},
		"the file sets it":                      {explicit, policy.Request{}},
		"a parent profile sets it":              {"version: 1\nprofiles: {a: {memory: 1GiB}, b: {inherits: a}}\nrules: [{name: b, profile: b}]\n", policy.Request{}},
		"another limit may be unenforced":       {explicit + "allow_unenforced: [cpu]", policy.Request{}},
		"a property sets it within the default": {"version: 1\nallow_unenforced: [processes]", asked},
	} {
		_, err := parse(t, c.text).Compile(c.request, few)
		expect.That(t, errors.Is(err, sandbox.ErrUnsupported) && strings.Contains(err.Error(), "memory 1GiB"),
			"%s: got %v, want ErrUnsupported with memory 1GiB", name, err)
		g, err := parse(t, strings.ReplaceAll(strings.Split(c.text, "allow_")[0], "version: 1", "version: 1\nallow_unenforced: [memory]")).Compile(c.request, few)
		expect.That(t, err == nil && g.Limits.Memory == sandbox.Unlimited,
			"%s, permitted: got %+v, %v; want no limit", name, g, err)
	}
	_, err = policy.Default().Compile(policy.Request{Properties: properties("cloister-cpus=1.5")}, few)
	expect.That(t, errors.Is(err, sandbox.ErrUnsupported) && strings.Contains(err.Error(), "cpus 1.5"),
		"a limit that no profile has: got %v, want ErrUnsupported with cpus 1.5", err)
}

func TestWhyNamesRuleAndLine(t *testing.T) {
	var b strings.Builder
	p := parse(t, wide)
	for _, r := range []policy.Request{
		{},
		{Mnemonic: "TestRunner"},
		{Instance: "wide", Properties: properties("cloister-memory=20GiB", "cloister-network=a.example.org:443")},
		{Instance: "once", Properties: properties("cloister-network=10.0.0.1:80", "cloister-listen=false", "cloister-audit=full")},
	} {
		fmt.Fprintf(&b, "== %s %s %v\n%s\n", r.Instance, r.Mnemonic, r.Properties, strings.Join(compile(t, p, r).Why, "\n"))
	}
	golden(t, "why.txt", b.String())
}

func BenchmarkCompile(b *testing.B) {
	p := policy.Default()
	for b.Loop() {
		if _, err := p.Compile(policy.Request{Mnemonic: "CppCompile", Target: "//a:b"}, sandbox.AllLimits); err != nil {
			b.Fatal(err)
		}
	}
}

// A platform property asks for more memory, and the policy bounds it.
func Example() {
	p, err := policy.Parse("policy.yaml", []byte(`version: 1
rules:
  - name: linkers
    when: {mnemonic: CppLink}
    max: {memory: 16GiB}
`))
	if err != nil {
		fmt.Println(err)
		return
	}
	request := policy.Request{Mnemonic: "CppLink", Properties: []policy.Property{{Name: "cloister-memory", Value: "12GiB"}}}
	grant, err := p.Compile(request, sandbox.AllLimits)
	fmt.Println(sandbox.Bytes(grant.Limits.Memory), err)

	request.Mnemonic = "CppCompile"
	_, err = p.Compile(request, sandbox.AllLimits)
	fmt.Println(err)
	// Output:
	// 12.0 GiB <nil>
	// property cloister-memory=12GiB: rule "default" grants at most 4GiB (built in); lower the property, or ask the operator for a rule with max: {memory: 12GiB}
}

// TestZeroPolicy: the zero Policy is Default, and a nil one an error.
func TestZeroPolicy(t *testing.T) {
	var zero policy.Policy
	got := must.Get(zero.Compile(policy.Request{}, sandbox.AllLimits))(t)
	want := must.Get(policy.Default().Compile(policy.Request{}, sandbox.AllLimits))(t)
	expect.That(t, got.Limits == want.Limits && got.Profile == want.Profile && zero.Hash() == policy.Default().Hash(),
		"got grant %+v, want %+v", got, want)
	if _, err := (*policy.Policy)(nil).Compile(policy.Request{}, sandbox.AllLimits); err == nil || !strings.Contains(err.Error(), "policy.Default") {
		t.Errorf("nil policy: got error %v, want one that names policy.Default", err)
	}
}

// TestDefaultsFollowTheHost: without a file, properties may request what the host has, and the limit of processes grows
// with the processors.
func TestDefaultsFollowTheHost(t *testing.T) {
	large := policy.Host{CPUs: 64, Memory: 256 << 30, Threads: 100_000, OpenFiles: 500_000}
	file := parse(t, "version: 1\nprofiles: {small: {processes: 10}}\nrules:\n"+
		"- {name: s, when: {instance: small}, profile: small}\n- {name: m, when: {instance: max}, max: {processes: 2000, memory: 5GiB}}")
	processes := func(g *policy.Grant) int64 { return g.Limits.Processes }
	memory := func(g *policy.Grant) int64 { return g.Limits.Memory }
	for _, c := range []struct {
		name    string
		policy  *policy.Policy
		request policy.Request
		of      func(*policy.Grant) int64
		want    int64 // 0: refused
	}{
		{"build without a host", policy.Default(), policy.Request{}, processes, 128},
		{"test without a host", policy.Default(), policy.Request{Mnemonic: "TestRunner"}, processes, 1024},
		{"build on one processor", policy.Default().On(policy.Host{CPUs: 1}), policy.Request{}, processes, 128},
		{"build", policy.Default().On(large), policy.Request{}, processes, 4096},
		{"test", policy.Default().On(large), policy.Request{Mnemonic: "TestRunner"}, processes, 16384},
		{"more processes", policy.Default().On(large), policy.Request{Properties: properties("cloister-processes=100000")}, processes, 100_000},
		{"too many processes", policy.Default().On(large), policy.Request{Properties: properties("cloister-processes=100001")}, processes, 0},
		{"the default memory", policy.Default().On(large), policy.Request{}, memory, 4 << 30},
		{"the README's memory", policy.Default().On(large), policy.Request{Properties: properties("cloister-memory=8GiB")}, memory, 8 << 30},
		{"all memory", policy.Default().On(large), policy.Request{Properties: properties("cloister-memory=256GiB")}, memory, 256 << 30},
		{"too much memory", policy.Default().On(large), policy.Request{Properties: properties("cloister-memory=257GiB")}, memory, 0},
		{"more than unknown memory", policy.Default().On(policy.Host{CPUs: 1}), policy.Request{Properties: properties("cloister-memory=5GiB")}, memory, 0},
		{"a small host", policy.Default().On(policy.Host{Memory: 2 << 30}), policy.Request{}, memory, 4 << 30},
		{"a file without a value", file.On(large), policy.Request{}, processes, 4096},
		{"a file with a value", file.On(large), policy.Request{Instance: "small"}, processes, 10},
		{"a file with a maximum", file.On(large), policy.Request{Instance: "max"}, processes, 2000},
		{"more than a file's profile", file.On(large), policy.Request{Properties: properties("cloister-memory=5GiB")}, memory, 0},
		{"up to a file's maximum", file.On(large), policy.Request{Instance: "max", Properties: properties("cloister-memory=5GiB")}, memory, 5 << 30},
	} {
		g, err := c.policy.Compile(c.request, sandbox.AllLimits)
		if c.want == 0 {
			expect.Error(t, err, policy.ErrRefused, "%s", c.name)
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		} else if got := c.of(g); got != c.want {
			t.Errorf("%s: got %d, want %d", c.name, got, c.want)
		}
	}
	// Records of runs and policies are the same on every host.
	here, there := compile(t, policy.Default(), policy.Request{}), compile(t, policy.Default().On(large), policy.Request{})
	expect.That(t, here.Stated == there.Stated,
		"got stated limits %+v and %+v, want the same on every host", here.Stated, there.Stated)
	expect.Equal(t, policy.Default().On(large).Text(), policy.Default().Text(), "text on any host")
}

// TestHostRaisesTheAuditLevel where neither the file nor the action sets one.
func TestHostRaisesTheAuditLevel(t *testing.T) {
	watched := policy.Host{Audit: sandbox.AuditFull}
	file := parse(t, "version: 1\nrules: [{name: r, when: {instance: set}, profile: set}]\nprofiles: {set: {audit: attempts}}")
	for _, c := range []struct {
		name    string
		policy  *policy.Policy
		request policy.Request
		want    sandbox.Audit
	}{
		{"built in", policy.Default(), policy.Request{}, sandbox.AuditViolations},
		{"by the host", policy.Default().On(watched), policy.Request{}, sandbox.AuditFull},
		{"by the action", policy.Default().On(watched), policy.Request{Properties: properties("cloister-audit=attempts")}, sandbox.AuditViolations},
		{"a file that sets none", file.On(watched), policy.Request{}, sandbox.AuditFull},
		{"by the file", file.On(watched), policy.Request{Instance: "set"}, sandbox.AuditViolations},
	} {
		expect.Equal(t, compile(t, c.policy, c.request).Audit, c.want, "%s", c.name)
	}
}
