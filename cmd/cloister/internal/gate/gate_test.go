// SPDX-License-Identifier: Apache-2.0

package gate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestPolicyMistakes: each mistake is an error with file, line and what to write.
func TestPolicyMistakes(t *testing.T) {
	step := func(text string) string { return "hermetic_steps:\n  - {id: a, command: [x], " + text + "}\n" }
	host := func(text string) string { return step("allow: {outbound_hosts: [{" + text + "}]}") }
	for _, c := range []struct{ text, want string }{
		{"", "p.yml: [1:1] the file is empty: write hermetic_steps: [{id: NAME, command: [PROGRAM]}]"},
		{"# nothing\n", "p.yml: [1:1] the file is empty"},
		{"hermetic_steps: []\n", "p.yml: [1:1] no step: write hermetic_steps"},
		{"hermetic_step: []\n", `did you mean "hermetic_steps"?`},
		{step("commnd: [x]"), `p.yml: [2:27] unknown key "commnd"`},
		{step("commnd: [x]"), `did you mean "command"?`},
		{"hermetic_steps:\n  - {id: a, command: [x]}\n  - {id: A, command: [x]}\n", `p.yml: [3:10] duplicate id "A": the step of line 2 has it`},
		{"hermetic_steps:\n  - {id: ../a, command: [x]}\n", `p.yml: [2:10] invalid id "../a"`},
		{"hermetic_steps:\n  - {command: [x]}\n", "the step has no id"},
		{"hermetic_steps:\n  - {id: a}\n", "step a has no command"},
		{step(`env: {NO_NETWORK_LISTEN: "yes"}`), `NO_NETWORK_LISTEN is "yes": write "1"`},
		{step(`env: {"A B": x}`), `invalid variable name "A B"`},
		{step("timeout: 1m") + "parallel: 0\n", `p.yml: [3:11] invalid number "0": write the number of steps at a time, from 1 to 64`},
		{step("timeout: 20"), `invalid timeout "20": write a number with a unit, such as 20m`},
		{step("limits: {memroy: 1GiB}"), `did you mean "memory"?`},
		{step("limits: {memory: 1}"), `memory: property cloister-memory=1: rule "default" refuses it: invalid size "1"`},
		{step("inputs: {}"), "write either revision: NAME or directory: PATH"},
		{step("inputs: {directory: ../x}"), `directory "../x": write a path below the working directory`},
		{host("host: a.example.com"), "p.yml: [2:52] the exception has no owner: an exception states host, owner, reason and expires"},
		{
			host("host: a, owner: x, reason: y, expires: 2030-01-01}, {host: a, owner: z, reason: y, expires: 2031-01-01"),
			"duplicate exception for a: line 2 has one",
		},
		{host("host: a.example.com, owner: x, reason: y, expires: soon"), `invalid day "soon": write the last day of the exception as YYYY-MM-DD`},
		{host("host: 'https://A.example.com/x'"), `invalid host "https://A.example.com/x": did you mean "a.example.com"?`},
		{host("host: 'a.example.com:443'"), `did you mean "a.example.com"? Ports are in outbound_ports`},
		{host("host: '*.example.com'"), `invalid host "*.example.com": write a lower-case host name`},
		{host("host: 127.0.0.1"), `invalid host "127.0.0.1"`},
		{host("host: '::1'"), `invalid host "::1"`},
		{step("allow: {outbound_ports: [{port: 0, owner: x, reason: y, expires: 2030-01-01}]}"), `invalid port "0": write a number from 1 to 65535`},
		{step("allow: {outbound_ports: [{port: 1, owner: x, reason: y, expires: 2030-01-01}]}"), "step a has outbound_ports without outbound_hosts: write the hosts"},
	} {
		expect.Message(t, expect.Err(parsePolicy("p.yml", []byte(c.text))), c.want, "%s", c.text)
	}
}

// TestSignalBeforeTheSteps: a signal while the gate asks git for the revision is no mistake in the command line.
func TestSignalBeforeTheSteps(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(&interrupt.Error{Signal: syscall.SIGTERM})
	err := (&gate{Config: &Config{Revision: "HEAD"}}).open(ctx, nil)
	if by, ok := errors.AsType[*exit.Error](err); !ok || by.Code != 128+int(syscall.SIGTERM) {
		t.Errorf("got %v, want the exit code of the signal", err)
	}
}

// TestStrictModeNeedsTheFullSandbox: with every layer that protects the host or observes a step, unlike other modes.
func TestStrictModeNeedsTheFullSandbox(t *testing.T) {
	full := func() *gate {
		g := &gate{Config: &Config{Mode: modeStrict}}
		g.Sandbox.Tier, g.features.Tier, g.features.Audits = "full", "full", []sandbox.Audit{sandbox.AuditViolations}
		for _, layer := range []namespace.Layer{namespace.Seccomp, namespace.Landlock, namespace.Monitor} {
			g.features.Checks = append(g.features.Checks, sandbox.Check{Name: string(layer), OK: true})
		}
		return g
	}
	for name, c := range map[string]struct {
		lacking func(g *gate)
		want    string
	}{
		"nothing":          {func(*gate) {}, ""},
		"Landlock":         {func(g *gate) { g.features.Checks[1] = sandbox.Check{Name: "landlock", Fix: "enable it"} }, "lacks landlock here: enable it"},
		"the monitor":      {func(g *gate) { g.features.Checks[2] = sandbox.Check{Name: "monitor", Detail: "old kernel"} }, "lacks monitor here: old kernel"},
		"records":          {func(g *gate) { g.features.Audits = nil }, "records of network system calls"},
		"a part":           {func(g *gate) { g.features.Tier = "partial" }, "the sandbox is partial here"},
		"a requested tier": {func(g *gate) { g.Sandbox.Tier = "namespaces" }, "omit --sandbox namespaces"},
	} {
		g := full()
		c.lacking(g)
		g.describeSandbox()
		if got := g.shortfall(); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("without %s: got %q, want %q", name, got, c.want)
		}
		if g.Mode = modeEnforce; g.shortfall() != "" {
			t.Errorf("without %s, mode enforce: got %q", name, g.shortfall())
		}
	}
}

// TestEndpoints: each unexpired host is allowed at each unexpired port, by default at 443.
func TestEndpoints(t *testing.T) {
	day := func(text string) time.Time {
		d := must.Get(time.Parse(time.DateOnly, text))(t)
		return d
	}
	old, last, later := day("2026-01-01"), day("2026-02-01"), day("2026-03-01")
	s := &step{hosts: []*exception{{host: "a", expires: last}, {host: "b", expires: old}, {host: "c", expires: later}}}
	expect.Slices(t, s.endpoints(last), []sandbox.Endpoint{{Host: "a", Port: 443}, {Host: "c", Port: 443}},
		"without ports")
	s.ports = []*exception{{port: 1, expires: later}, {port: 2, expires: old}}
	expect.Slices(t, s.endpoints(last), []sandbox.Endpoint{{Host: "a", Port: 1}, {Host: "c", Port: 1}}, "with ports")
	f := s.find(nil, "p.yml", last)
	expect.That(t, len(f.violations) == 2 && f.violations[0].Subject == "b" && f.violations[1].Subject == "port 2",
		"got violations %+v, want those of the two expired exceptions", f.violations)
}

// TestSchemaHasTheKeysOfThePolicy: the schema knows exactly the keys that the parser reads.
func TestSchemaHasTheKeysOfThePolicy(t *testing.T) {
	type object struct {
		Properties           map[string]object
		AdditionalProperties any
	}
	var schema struct {
		object
		Defs map[string]object `json:"$defs"`
	}
	must.Succeed(t, json.Unmarshal([]byte(Schema), &schema))
	step := schema.Defs["step"]
	for _, c := range []struct {
		text string
		of   object
	}{
		{"{NAME: 1}", schema.object},
		{"{hermetic_steps: [{NAME: 1}]}", step},
		{"{hermetic_steps: [{inputs: {NAME: 1}}]}", step.Properties["inputs"]},
		{"{hermetic_steps: [{limits: {NAME: 1}}]}", step.Properties["limits"]},
		{"{hermetic_steps: [{allow: {NAME: 1}}]}", step.Properties["allow"]},
		{"{hermetic_steps: [{allow: {outbound_hosts: [{NAME: 1}]}}]}", schema.Defs["host"]},
		{"{hermetic_steps: [{allow: {outbound_ports: [{NAME: 1}]}}]}", schema.Defs["port"]},
	} {
		want := strings.Join(slices.Sorted(maps.Keys(c.of.Properties)), ", ")
		_, err := parsePolicy("p.yml", []byte(strings.Replace(c.text, "NAME", "not-a-key-of-it", 1)))
		expect.That(t, err != nil && strings.Contains(err.Error(), "write one of "+want+"\n"),
			"%s: got %v, want an error that lists %s", c.text, err, want)
		expect.That(t, c.of.AdditionalProperties == false, "%s: the schema permits unknown keys", c.text)
	}
}

// TestEveryNetworkEventIsAViolation: also those of kinds that are added later.
func TestEveryNetworkEventIsAViolation(t *testing.T) {
	remote := sandbox.Endpoint{Host: "192.0.2.1", Port: 1}
	for _, c := range []struct {
		event sandbox.Event
		want  string
	}{
		{sandbox.Event{Kind: sandbox.EventConnect, Subject: "tcp 192.0.2.1:1", Endpoint: remote}, "connect"},
		{sandbox.Event{Kind: sandbox.EventConnect, Subject: "unix /run/docker.sock"}, "connect"},
		{sandbox.Event{Kind: "lookup", Subject: "example.com"}, "lookup"},
		{sandbox.Event{Kind: sandbox.EventAllowed, Subject: "192.0.2.1:1", Endpoint: remote}, ""},
		{sandbox.Event{Kind: sandbox.EventSyscall, Subject: "listen"}, "listen"},
		{sandbox.Event{Kind: sandbox.EventSyscall, Subject: "listen(tcp [::]:80)"}, "listen"},
		{sandbox.Event{Kind: sandbox.EventSyscall, Subject: "listen(unix)"}, ""},
		{sandbox.Event{Kind: sandbox.EventSyscall, Subject: "bind(udp 0.0.0.0:53)"}, "listen"},
		{sandbox.Event{Kind: sandbox.EventSyscall, Subject: "socket(AF_INET, SOCK_RAW)"}, "connect"},
		{sandbox.Event{Kind: sandbox.EventSyscall, Subject: "socket(AF_VSOCK)"}, "connect"},
		{sandbox.Event{Kind: sandbox.EventSyscall, Subject: "socket(AF_ALG)"}, ""},
		{sandbox.Event{Kind: sandbox.EventSyscall, Subject: "socket(AF_NETLINK, protocol 15)"}, ""},
		{sandbox.Event{Kind: sandbox.EventSyscall, Subject: "mount"}, ""},
		{sandbox.Event{Kind: sandbox.EventWrite, Subject: "/usr/x"}, ""},
		{sandbox.Event{Kind: sandbox.EventLimit, Subject: "memory"}, ""},
	} {
		expect.Equal(t, classify(&c.event), c.want, "%+v", c.event)
	}
}

// TestLimitIsNamedOnce: by the message of the step, not among what else was denied.
func TestLimitIsNamedOnce(t *testing.T) {
	limit := sandbox.Event{Kind: sandbox.EventLimit, Subject: "memory", Count: 1}
	write := sandbox.Event{Kind: sandbox.EventWrite, Subject: "/usr/x", Count: 1}
	f := (&step{}).find(&sandbox.Result{Exceeded: &limit, Events: []sandbox.Event{write}}, "p.yml", time.Now())
	expect.That(t, len(f.denied) == 1 && f.denied[0] == write.String(), "got %q, want the write only", f.denied)
}

// TestSecretsAreRemoved in every notation of the evidence.
func TestSecretsAreRemoved(t *testing.T) {
	clean := secrets([]string{
		"DEPLOY_TOKEN=abc\"<>&'\\def", "SSH_KEY=-----BEGIN-----\nline-of-the-key\n", "DB=postgres://u:pass-word@h/d", "GIT_AUTHOR_NAME=somebody",
		"SSHPASS=pass-word-2", "DB_PASS=pass-word-3", "GCP_CREDS=pass-word-4", "CI_JOB_JWT=pass-word-5", "BYPASS=nothing-secret",
		"AZURE_STORAGE_CONNECTION_STRING=pass-word-6", "NPM_PASSWORD=short", "URL=https://token-as-user-name@h/ ssh://deploy@h", "OTHER=https://token-with-password:x@h/", "LONG_SECRET=abc\"<>&'\\def-and-more", "PWD=/home/x/project",
		"GOPRIVATE=example.com/team",
	})
	encoded := must.Get(encode("abc\"<>&'\\def"))(t)
	r := Report{Steps: []stepReport{{ID: "x", Message: "abc\"<>&'\\def", Verdict: failed}}}
	for text, want := range map[string]string{
		"x abc\"<>&'\\def y":               "x [removed] y",
		"abc\"<>&'\\def-and-more":          "[removed]",
		string(encoded):                    "\"[removed]\"\n",
		"--line-of-the-key--":              "--[removed]--",
		"2 pass-word-2 3 pass-word-3":      "2 [removed] 3 [removed]",
		"4 pass-word-4 5 pass-word-5":      "4 [removed] 5 [removed]",
		"6 pass-word-6 7 nothing-secret":   "6 [removed] 7 nothing-secret",
		"postgres://u:pass-word@h/d":       "postgres://u:[removed]@h/d",
		"https://token-as-user-name@h/ x":  "https://[removed]@h/ x",
		"deploy token-with-password":       "deploy [removed]",
		"somebody short /home/x/project/y": "somebody short /home/x/project/y",
		"example.com/team/module":          "example.com/team/module",
	} {
		expect.Equal(t, clean.Replace(text), want, "%q", text)
	}
	if got := clean.Replace(string(r.junit())); !strings.Contains(got, ">[removed]<") {
		t.Errorf("got %s, want the secret removed", got)
	}
}

// TestDirectoriesLoseTheirRepositories: a step on a directory does not see the configuration of Git, which may contain
// credentials. A checkout keeps its own repository.
func TestDirectoriesLoseTheirRepositories(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a", ".git/config", "module/.git", "module/b", ".gitignore"} {
		file := filepath.Join(dir, name)
		must.Succeed(t, os.MkdirAll(filepath.Dir(file), 0o755))
		must.Succeed(t, os.WriteFile(file, nil, 0o600))
	}
	for commit, want := range map[string][]string{
		"":     {"out", "out/.gitignore", "out/a", "out/module", "out/module/b"},
		"1234": {"out", "out/.git", "out/.git/config", "out/.gitignore", "out/a", "out/module", "out/module/.git", "out/module/b"},
	} {
		src := &source{dir: dir, commit: commit, time: time.Unix(0, 0)}
		root, err := os.OpenRoot(t.TempDir())
		must.Succeed(t, err)
		defer root.Close()
		got, _, err := src.copyTo(root, "out")
		must.Succeed(t, err)
		if _, n, err := src.measure(); err != nil || n != int64(len(want)) || !slices.Equal(got, want) {
			t.Errorf("commit %q: got %d names %q, %v; want %q", commit, n, got, err, want)
		}
	}
}

// TestLinksDoNotMoveTheEvidence: a link of the repository does not lead the evidence out of the working directory.
func TestLinksDoNotMoveTheEvidence(t *testing.T) {
	elsewhere := t.TempDir()
	t.Chdir(t.TempDir())
	must.Succeed(t, os.Symlink(elsewhere, "artifacts"))
	for _, out := range []string{"artifacts", "artifacts/gate"} {
		if _, _, err := openEvidence(out, "commit", t.TempDir(), secrets(nil)); err == nil || !strings.Contains(err.Error(), "absolute path") {
			t.Errorf("%s: got %v, want an error that advises an absolute path", out, err)
		}
	}
	if left, err := os.ReadDir(elsewhere); err != nil || len(left) > 0 {
		t.Errorf("got %v, %v, want nothing outside of the working directory", left, err)
	}
	for _, out := range []string{"new/gate", ".", elsewhere} {
		_, _, err := openEvidence(out, "commit", t.TempDir(), secrets(nil))
		must.Succeed(t, err)
	}
}

// TestPartialEvidenceIsRemoved: a gate removes what killed gates left, on any commit, but not what running gates use.
func TestPartialEvidenceIsRemoved(t *testing.T) {
	out := t.TempDir()
	living, held, _, err := localworker.NewDir(out)
	must.Succeed(t, err)
	dead, killed, _, err := localworker.NewDir(out)
	must.Succeed(t, err)
	must.Succeed(t, os.WriteFile(filepath.Join(dead, "report.md"), nil, 0o600))
	must.Succeed(t, killed.Close())
	must.Succeed(t, os.Mkdir(filepath.Join(out, "other-commit"), 0o755))
	_, removed, err := openEvidence(out, "commit", t.TempDir(), secrets(nil))
	must.Succeed(t, err)
	expect.That(t, slices.Equal(removed, []string{dead}), "got removed %q, want %q", removed, dead)
	left, err := filepath.Glob(filepath.Join(out, "*"))
	must.Succeed(t, err)
	expect.Slices(t, left, []string{living, filepath.Join(out, "other-commit")}, "left")
	must.Succeed(t, held.Close())
}

// TestGatesPublishAtOnce: the evidence of a commit is that of one gate, as a whole, and nothing else is left.
func TestGatesPublishAtOnce(t *testing.T) {
	out := t.TempDir()
	var running sync.WaitGroup
	for i := range 8 {
		e, _, err := openEvidence(out, "commit", t.TempDir(), secrets(nil))
		must.Succeed(t, err)
		for n := range 50 {
			must.Succeed(t, e.write(fmt.Sprint("logs/", n), []byte(fmt.Sprint(i))))
		}
		running.Go(func() {
			expect.Error(t, e.publish(), nil)
		})
	}
	running.Wait()
	left := must.Get(filepath.Glob(filepath.Join(out, "*")))(t)
	expect.That(t, len(left) == 1, "got %q, want the evidence only", left)
	var texts []string
	for n := range 50 {
		text := must.Get(os.ReadFile(filepath.Join(out, "commit/logs", fmt.Sprint(n))))(t)
		texts = append(texts, string(text))
	}
	if _, err := os.Stat(filepath.Join(out, "commit", localworker.LockFile)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v for the lock, want none in the evidence", err)
	}
	expect.That(t, len(slices.Compact(texts)) == 1, "got the files of several gates: %q", texts)
}
