// SPDX-License-Identifier: Apache-2.0

package sandboxtest_test

import (
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
)

// A test of a backend of your own: its name begins with Test. The backend of this example also needs a TestMain that
// begins with namespace.Init.
func ExampleTestBackend() {
	_ = func(t *testing.T) {
		sandboxtest.TestBackend(t, func() sandbox.Backend { return namespace.New(namespace.Config{}) })
	}
}

// A script in a sandbox, for a test beyond the contract.
func ExampleRun_Do() {
	_ = func(t *testing.T) {
		b := namespace.New(namespace.Config{})
		defer b.Close()
		r := sandboxtest.Run{
			Script: "echo hello > /build/greeting; cat /build/greeting",
			Spec:   func(s *sandbox.Spec) { s.Network = sandbox.Network{} },
		}
		r.Do(t, b)
		if r.Result.ExitCode != 0 || r.Stdout != "hello\n" {
			t.Errorf("got exit code %d, %q", r.Result.ExitCode, r.Stdout)
		}
	}
}
