// SPDX-License-Identifier: Apache-2.0

package confinement

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// A machine is a fake whose settings commands change.
type machine struct {
	testing.TB
	dir  string
	ran  []string
	fail error
}

func newMachine(t *testing.T, settings map[string]string) *machine {
	m := &machine{TB: t, dir: t.TempDir()}
	for name, value := range settings {
		m.set(name, value)
	}
	return m
}

func (m *machine) set(name, value string) {
	path := filepath.Join(m.dir, strings.ReplaceAll(name, ".", "/"))
	must.Succeed(m, os.MkdirAll(filepath.Dir(path), 0o755))
	must.Succeed(m, os.WriteFile(path, []byte(value+"\n"), 0o644))
}

func (m *machine) get(name string) string {
	b, _ := os.ReadFile(filepath.Join(m.dir, strings.ReplaceAll(name, ".", "/")))
	return strings.TrimSpace(string(b))
}

// run executes sysctl -w.
func (m *machine) run(_ context.Context, command []string) error {
	m.ran = append(m.ran, strings.Join(command, " "))
	if m.fail != nil {
		return m.fail
	}
	name, value, _ := strings.Cut(command[len(command)-1], "=")
	m.set(name, value)
	return nil
}

// probe reports one fault at a time, as the sandbox does.
func (m *machine) probe(context.Context) (*Report, error) {
	bad := errors.New("actions cannot run")
	switch {
	case m.get("user.max_pid_namespaces") == "0":
		return &Report{Checks: []Check{{"FAIL", "zygote", "no space", "sudo sysctl -w user.max_pid_namespaces=15000", ""}}}, bad
	case m.get("kernel.apparmor_restrict_unprivileged_userns") == "1":
		return &Report{Checks: []Check{{"FAIL", "zygote", "denied", "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile", ""}}}, bad
	}
	return &Report{Checks: []Check{{"ok", "seccomp", "", "", ""}, {"off", "landlock", "", "boot with landlock in lsm=", ""}}}, nil
}

func (m *machine) repair(yes bool, answers string) (string, error) {
	var out strings.Builder
	r := Repairer{Probe: m.probe, Run: m.run, Settings: m.dir, Yes: yes, In: strings.NewReader(answers), Out: &out}
	_, err := r.Repair(m.Context())
	return out.String(), err
}

const (
	namespaces = "sudo sysctl -w user.max_pid_namespaces=15000"
	apparmor   = "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
)

// TestRepairRunsWhatIsAccepted: each command is shown with the one that reverts it before it runs, and faults that
// appear only then are repaired too.
func TestRepairRunsWhatIsAccepted(t *testing.T) {
	broken := map[string]string{"user.max_pid_namespaces": "0", "kernel.apparmor_restrict_unprivileged_userns": "1"}
	for _, c := range []struct {
		name, answers string
		yes           bool
		ran           []string
		works         bool
	}{
		{"both", "y\nYES\n", false, []string{namespaces, apparmor}, true},
		{"no", "n\n", false, nil, false},
		{"other", "sure\n", false, nil, false},
		{"end of input", "", false, nil, false},
		{"first only", "y\n", false, []string{namespaces}, false},
		{"--yes", "", true, []string{namespaces}, false},
	} {
		m := newMachine(t, broken)
		out, err := m.repair(c.yes, c.answers)
		expect.Slices(t, m.ran, c.ran, c.name)
		expect.That(t, (err == nil) == c.works, "%s: got error %v, want none: %t", c.name, err, c.works)
		expect.Text(t, out, "undo  sudo sysctl -w user.max_pid_namespaces=0 ", c.name)
		expect.That(t, !c.works || strings.Contains(out, "landlock: not automatic: boot with landlock in lsm="), "%s: got %s", c.name, out)
	}
}

// TestYesLeavesUserNamespacesOff: somebody may have turned them off to protect the machine.
func TestYesLeavesUserNamespacesOff(t *testing.T) {
	m := newMachine(t, map[string]string{"user.max_user_namespaces": "0"})
	r := Repairer{Settings: m.dir, Yes: true, Run: m.run, Out: &strings.Builder{}, Probe: func(context.Context) (*Report, error) {
		return &Report{Checks: []Check{{"FAIL", "zygote", "no space", "sudo sysctl -w user.max_user_namespaces=15000", ""}}}, nil
	}}
	must.Get(r.Repair(t.Context()))(t)
	expect.Slices(t, m.ran, nil, "commands")
}

// TestRepairEndsAtAFailure: a command that fails, or changes nothing, does not run again.
func TestRepairEndsAtAFailure(t *testing.T) {
	m := newMachine(t, map[string]string{"user.max_pid_namespaces": "0"})
	m.fail = errors.New("permission denied")
	_, err := m.repair(true, "")
	e, ok := errors.AsType[*exit.Error](err)
	expect.That(t, ok && e.Code == exit.Environment && strings.Contains(err.Error(), namespaces), "got %v", err)
	expect.Equal(t, len(m.ran), 1, "commands")

	runs := 0
	r := Repairer{
		Probe: m.probe, Run: func(context.Context, []string) error { runs++; return nil }, Settings: m.dir, Yes: true, In: strings.NewReader(""), Out: &strings.Builder{},
	}
	_, err = r.Repair(t.Context())
	expect.That(t, err != nil && runs == 1, "got %v after %d commands, want the error of the check after 1", err, runs)
}

// TestRepairRefusesOtherCommands: what a check advises is executed only if it is a known setting that can be reverted.
func TestRepairRefusesOtherCommands(t *testing.T) {
	m := newMachine(t, map[string]string{
		"user.max_pid_namespaces": "0", "kernel.core_pattern": "core", "user.max_ipc_namespaces": "1; reboot", "fs.protected_hardlinks": "0",
	})
	r := Repairer{Settings: m.dir}
	for advice, want := range map[string]bool{
		namespaces: true, "sudo sysctl -w fs.protected_hardlinks=1": true, "sudo modprobe overlay": true,
		"sysctl -w user.max_pid_namespaces=1": false, "run a newer kernel": false, "": false, "sudo reboot now": false,
		"sudo sysctl -w kernel.core_pattern=1":            false,
		"sudo sysctl -w user.max_pid_namespaces=1;reboot": false, "sudo sysctl -w user.max_pid_namespaces=1 reboot": false,
		"sudo sysctl -w user.max_ipc_namespaces=1": false, // its value cannot be restored
		"sudo sysctl -w user.max_net_namespaces=1": false, // nor read
		"sudo sysctl -w fs.protected_hardlinks=0":  false, // it has this value
		"sudo modprobe overlay force":              false, "sudo modprobe kvm": false,
	} {
		expect.Equal(t, r.parse(advice) != nil, want, advice)
	}
	expect.Equal(t, strings.Join((&Repairer{Settings: m.dir, Root: true}).parse(namespaces).command, " "), strings.TrimPrefix(namespaces, "sudo "))
}
