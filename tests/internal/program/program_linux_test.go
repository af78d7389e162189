// SPDX-License-Identifier: Apache-2.0

package program

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestTimeBeginsWithTheProgram: what compiles slowly leaves its calls all of their time.
func TestTimeBeginsWithTheProgram(t *testing.T) {
	bin := t.TempDir()
	// Called as: go build FLAGS -o NAME PACKAGE, and as go list.
	const slow = "#!/bin/sh\n[ \"$1\" = list ] || { sleep 0.3; : > \"$4\"; }\n"
	if err := os.WriteFile(filepath.Join(bin, "go"), []byte(slow), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	p := Program{dir: t.TempDir()}
	ctx, path := p.Within(t, time.Minute)
	made, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	// The clock of files may be late by a tick of the kernel, and is never early.
	if end, ok := ctx.Deadline(); !ok || end.Sub(made.ModTime()) < time.Minute {
		t.Errorf("the time ends at %v, less than a minute after %v, when the program was there", end, made.ModTime())
	}
}
