// SPDX-License-Identifier: Apache-2.0

package program

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/must"
)

// TestTimeLimitExcludesCompilation uses a go command that compiles slowly.
func TestTimeLimitExcludesCompilation(t *testing.T) {
	bin := t.TempDir()
	// Called as go run FLAG FLAG PACKAGE NAME and as go list.
	const slow = "#!/bin/sh\n[ \"$1\" = list ] || { sleep 0.3; : > \"$5\"; }\n"
	must.Succeed(t, os.WriteFile(filepath.Join(bin, "go"), []byte(slow), 0o755))
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	p := Program{dir: t.TempDir()}
	ctx, path := p.Within(t, time.Minute)
	made := must.Get(os.Stat(path))(t)
	// File times may lag by a tick of the kernel.
	if end, ok := ctx.Deadline(); !ok || end.Sub(made.ModTime()) < time.Minute {
		t.Errorf("got deadline %v, want at least a minute after the compilation at %v", end, made.ModTime())
	}
}
