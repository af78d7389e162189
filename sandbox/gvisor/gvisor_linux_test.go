// SPDX-License-Identifier: Apache-2.0

package gvisor_test

import (
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/gvisor"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
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
