// SPDX-License-Identifier: Apache-2.0

package gvisor_test

import (
	"os"
	"path/filepath"
	"reflect"
	"runtime/debug"
	"slices"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/gvisor"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
)

func TestMain(m *testing.M) {
	namespace.Init()
	if os.Args[0] == nameRunsc {
		hostileRunsc()
	}
	// What make gvisor builds, unless somebody chose another.
	if built, err := filepath.Abs("../../bin/runsc"); err == nil && os.Getenv("RUNSC_PATH") == "" {
		if _, err := os.Stat(built); err == nil {
			if err := os.Setenv("RUNSC_PATH", built); err != nil {
				panic(err)
			}
		}
	}
	if mark := os.Getenv(holdVariable); mark != "" {
		hold(mark)
		return
	}
	os.Exit(m.Run())
}

// needStatic skips the test if this program is dynamically linked, so that it cannot be pid 1 of a run.
func needStatic(t *testing.T) {
	t.Helper()
	info, ok := debug.ReadBuildInfo()
	if ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
		t.Skip("programs with the race detector are dynamically linked")
	}
}

func TestBackend(t *testing.T) {
	needStatic(t)
	sandboxtest.TestBackend(t, func() sandbox.Backend { return gvisor.New() })
}

// TestFeaturesAreListed: the backend claims these features, no less and no more, except that some limits need control
// groups.
func TestFeaturesAreListed(t *testing.T) {
	got := must.Get(backend(t).Probe(t.Context()))(t)
	limits := []sandbox.Limit{sandbox.LimitProcesses, sandbox.LimitOpenFiles, sandbox.LimitOutputBytes, sandbox.LimitOutputFiles}
	for _, c := range got.Checks {
		if limit, ok := map[string]sandbox.Limit{"memory limit": sandbox.LimitMemory, "CPU time limit": sandbox.LimitCPU}[c.Name]; ok && c.OK {
			limits = append(limits, limit)
		}
	}
	named := slices.DeleteFunc(got.Limits, func(l sandbox.Limit) bool { return l == sandbox.LimitMilliCPUs || l == sandbox.LimitDiskRate })
	slices.Sort(limits)
	slices.Sort(named)
	if !slices.Equal(named, limits) {
		t.Errorf("got limits %q, want %q", named, limits)
	}
	got.Tier, got.Layers, got.Limits, got.Checks = "", nil, nil, nil
	want := sandbox.Features{
		Backend: "gvisor", Kernel: "gVisor", Audits: []sandbox.Audit{sandbox.AuditOff}, ListenControl: true, Lower: true,
		Conditions: []sandbox.Condition{sandbox.ConditionHostname, sandbox.ConditionUser, sandbox.ConditionUmask, sandbox.ConditionCPUs},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
