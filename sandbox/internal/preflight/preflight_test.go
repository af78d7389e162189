// SPDX-License-Identifier: Apache-2.0

package preflight_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/preflight"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestFail: a person reads the code, and a program gets it and the error behind it.
func TestFail(t *testing.T) {
	err := preflight.Fail(preflight.MSBFlag, "msb %d: %w", 5, fs.ErrNotExist)
	expect.Equal(t, err.Error(), "msb 5: file does not exist (msb_flag)")
	expect.Error(t, err, sandbox.ErrUnsupported)
	expect.Error(t, err, fs.ErrNotExist)
	expect.Equal(t, preflight.Code(fmt.Errorf("probe: %w", err)), preflight.MSBFlag)
	expect.Equal(t, preflight.Code(sandbox.ErrUnsupported), "", "an error without a code")
}

// TestStatic: only a program without a dynamic linker is static. The test of package gvisor has a static one.
func TestStatic(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text")
	must.Succeed(t, os.WriteFile(text, []byte("#!/bin/sh\n"), 0o755))
	expect.That(t, preflight.Static(text) != nil, "a script is static")
	if _, err := os.Stat("/proc/self/exe"); err == nil {
		expect.Error(t, preflight.Static("/bin/sh"), preflight.ErrDynamic)
	}
}
