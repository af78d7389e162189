// SPDX-License-Identifier: Apache-2.0

package sandboxtest_test

import (
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
)

// Call TestBackend from a test of your backend. With package namespace, TestMain must call namespace.Init first.
func ExampleTestBackend() {
	_ = func(t *testing.T) {
		sandboxtest.TestBackend(t, func() sandbox.Backend { return namespace.New(namespace.Config{}) })
	}
}

// Do runs a script in a sandbox, for a test beyond the contract.
func ExampleRun_Do() {
	_ = func(t *testing.T) {
		b := namespace.New(namespace.Config{})
		defer b.Close()
		r := sandboxtest.Run{
			Script: "echo hello > /build/greeting; cat /build/greeting",
			Spec:   func(s *sandbox.Spec) { s.Network = sandbox.Network{} },
		}
		r.Do(t, b)
		expect.That(t, r.Result.ExitCode == 0 && r.Stdout == "hello\n",
			"got exit code %d, %q", r.Result.ExitCode, r.Stdout)
	}
}
