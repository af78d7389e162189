// SPDX-License-Identifier: Apache-2.0

// Package cli_test runs the program as a user would and checks its output.
package cli_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/guestkernel"
	"github.com/cloister-build/cloister/tests/internal/program"
)

var built program.Program

func TestMain(m *testing.M) {
	namespace.Init()
	// What make gvisor builds, unless somebody chose another.
	if runsc, err := filepath.Abs("../../bin/runsc"); err == nil && os.Getenv("RUNSC_PATH") == "" {
		if _, err := os.Stat(runsc); err == nil {
			if err := os.Setenv("RUNSC_PATH", runsc); err != nil {
				panic(err)
			}
		}
	}
	guestkernel.Use()
	os.Exit(built.Main(m))
}

// confined skips the test if the machine does not support the sandbox.
func confined(t testing.TB) {
	t.Helper()
	if err := probe(); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
}

var probe = sync.OnceValue(func() error {
	b := namespace.New(namespace.Config{})
	defer b.Close()
	_, err := b.Probe(context.Background())
	return err
})

func TestCompletionScripts(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		out, err := exec.CommandContext(t.Context(), built.Path(t), "completion", shell).Output()
		expect.That(t, err == nil && bytes.Contains(out, []byte("cloister")),
			"completion %s: got %v and\n%s\nwant a script", shell, err, out)
	}
}
