// SPDX-License-Identifier: Apache-2.0

package gvisor

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/cgroup"
	"github.com/cloister-build/cloister/sandbox/internal/limit"
	"github.com/cloister-build/cloister/sandbox/internal/preflight"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
)

// probeTime is how long the probe may take. It takes a second on a slow machine, and forever if the platform hangs.
const probeTime = time.Minute

// findRunsc returns the path of runsc, without symbolic links.
func findRunsc() (string, error) {
	stated := os.Getenv("RUNSC_PATH")
	file, err := exec.LookPath(cmp.Or(stated, "runsc"))
	if err == nil {
		file, err = filepath.Abs(file)
	}
	if err == nil {
		file, err = filepath.EvalSymlinks(file)
	}
	if err != nil {
		return "", preflight.Fail(preflight.RunscNotFound, "runsc not found: RUNSC_PATH is %q: %w; build it with make gvisor, and set RUNSC_PATH=bin/runsc",
			stated, err)
	}
	if err := preflight.Static(file); err != nil {
		code := preflight.RunscNotStarted
		if errors.Is(err, preflight.ErrDynamic) {
			code = preflight.RunscDynamic
		}
		return "", preflight.Fail(code, "%s %w and cannot start its sandbox; build it with make gvisor", file, err)
	}
	return file, nil
}

// conditions are those that can differ from the default.
var conditions = []sandbox.Condition{
	sandbox.ConditionHostname, sandbox.ConditionUser, sandbox.ConditionUmask, sandbox.ConditionCPUs,
}

// features returns what this backend enforces.
func (b *backend) features() *sandbox.Features {
	return &sandbox.Features{
		Backend: name, Kernel: kernelName, Audits: []sandbox.Audit{sandbox.AuditOff}, ListenControl: true, Lower: true,
		Conditions: conditions, Limits: limit.Enforced(b.groups.Capabilities(), true, true),
	}
}

// Probe runs this executable in gVisor and reports what it finds there.
func (b *backend) Probe(ctx context.Context) (sandbox.Features, error) {
	f := sandbox.Features{Backend: name, Kernel: kernelName, Tier: "none"}
	check := func(ok, required bool, name, detail, fix string) {
		f.Checks = append(f.Checks, sandbox.Check{Name: name, OK: ok, Detail: detail, Fix: fix, Required: required})
	}
	err := b.start()
	if errors.Is(err, sandbox.ErrClosed) {
		return f, err
	}
	var facts *zygote.Facts
	if err == nil {
		facts, err = b.probe(ctx)
	}
	if err != nil {
		if preflight.Code(err) == "" {
			err = explain(err, "/proc/sys/kernel/yama/ptrace_scope")
		}
		check(false, true, "gVisor", err.Error(), "")
		return f, err
	}
	check(true, true, "gVisor", "runs have a kernel of their own, by "+b.runsc+" (platform systrap)", "")
	check(!facts.RootWritable && !facts.InputWritable, true, "read-only inputs", "the root and inputs are read-only mounts of this host", "")
	check(slices.Equal(facts.Interfaces, []string{"lo"}) && facts.Loopback, true, "network",
		fmt.Sprintf("loopback only (interfaces: %s)", strings.Join(facts.Interfaces, " ")), "")
	check(facts.Hostname == zygote.Hostname, true, "host name", facts.Hostname, "")
	check(facts.UID == zygote.UID && facts.GID == zygote.GID, true, "user", fmt.Sprintf("runs have user %d, group %d", facts.UID, facts.GID), "")
	check(strings.Trim(facts.Capabilities, "0") == "" && facts.NoNewPrivs, true, "capabilities", "none (effective set "+facts.Capabilities+")", "")
	check(facts.Filtered, true, "seccomp", "gVisor refuses unneeded system calls", "")
	for _, c := range f.Checks {
		if !c.OK {
			return f, preflight.Fail(preflight.GVisorProbe, "gVisor: %s: got: %s", c.Name, c.Detail)
		}
	}
	check(false, false, "syscall monitor", "attempts are not recorded: the calls of a run do not reach this host's kernel", "")
	can := b.groups.Capabilities()
	why, fix := b.groups.Missing()
	why = preflight.Coded(why, preflight.NoCgroup)
	if b.groups.Mode() != cgroup.None {
		check(true, false, "control groups", string(b.groups.Mode()), "")
	}
	together := func(ok bool) string {
		if ok {
			return "for all processes of a run together, with gVisor"
		}
		return why
	}
	check(can.LimitMemory, false, "memory limit", together(can.LimitMemory), fix)
	check(can.CountCPU, false, "CPU time limit", together(can.CountCPU), fix)
	enforced := b.features()
	enforced.Checks, enforced.Tier = f.Checks, "partial"
	enforced.Layers = []string{"gVisor (systrap)", "user+mount+pid+network+ipc+uts namespaces", "seccomp"}
	if b.groups.Mode() != cgroup.None {
		enforced.Layers = append(enforced.Layers, string(b.groups.Mode())+" limits")
	}
	return *enforced, nil
}

// explain returns the error of a probe with its code. The file is the setting of Yama, which may forbid what the platform
// systrap needs.
func explain(err error, yama string) error {
	if scope, readErr := os.ReadFile(yama); readErr == nil && strings.TrimSpace(string(scope)) == "3" {
		return preflight.Fail(preflight.PtraceScope, "gVisor did not run a probe, and kernel.yama.ptrace_scope=3 forbids ptrace: %w", err)
	}
	return preflight.Fail(preflight.GVisorProbe, "gVisor did not run a probe: %w", err)
}

// probe runs this executable as zygote.NameProbe and returns what it found.
func (b *backend) probe(ctx context.Context) (*zygote.Facts, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	w, err := b.Workspace(ctx, sandbox.Unlimited, sandbox.Unlimited)
	if err != nil {
		return nil, err
	}
	defer w.Close()
	self, err := filepath.EvalSymlinks("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	for _, dir := range []string{"in", "out"} {
		if err := w.Root().Mkdir(dir, 0o755); err != nil {
			return nil, err
		}
	}
	if err := w.Root().WriteFile("in/"+zygote.NameProbeInput, nil, 0o644); err != nil {
		return nil, err
	}
	unlimited := int64(sandbox.Unlimited)
	spec := &sandbox.Spec{
		Args: []string{zygote.NameProbe}, Dir: "/probe", Audit: sandbox.AuditOff,
		Network: sandbox.Network{Loopback: true, Listen: true},
		Inputs:  []sandbox.Input{{Target: zygote.NameProbe, Content: "host", Source: self}},
		Outputs: []sandbox.Output{{Target: "/probe", Source: "out"}},
		Lower:   []sandbox.Lower{{Target: "/probe", Source: "in"}}, Workspace: w.Name(),
		Limits: sandbox.Limits{
			Memory: unlimited, CPU: sandbox.Unlimited, Processes: 100, OpenFiles: unlimited,
			OutputBytes: unlimited, OutputFiles: unlimited, MilliCPUs: unlimited, DiskRate: unlimited,
		},
	}
	var stdout, stderr bytes.Buffer
	res, err := b.Run(ctx, spec, sandbox.Stdio{Stdout: &stdout, Stderr: &stderr})
	if err != nil {
		return nil, err
	}
	var facts zygote.Facts
	if err := json.Unmarshal(stdout.Bytes(), &facts); err != nil || res.ExitCode != 0 {
		return nil, fmt.Errorf("the probe exited with %d, stopped %t: %s", res.ExitCode, res.Stopped, strings.TrimSpace(stderr.String()))
	}
	return &facts, nil
}
