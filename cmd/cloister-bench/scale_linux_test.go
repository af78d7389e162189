// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/scale"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestScaleMeasuresOwnHead simulates a small farm: every action is answered once, although a worker vanishes and the
// head is killed.
func TestScaleMeasuresOwnHead(t *testing.T) {
	must.Succeed(t, build())
	dir := scratch(t)
	c := scaleBench{
		cloister: filepath.Join(programDir, "cloister"), size: scale.Size{Workers: 4, Slots: 8, Actions: 300, Builds: 12},
		sizes: 1, delay: 20 * time.Millisecond, timeout: 10 * time.Second,
	}
	var out, info strings.Builder
	if err := c.run(t.Context(), &out, &info); err != nil {
		t.Fatalf("%v\n%s%s", err, &out, &info)
	}
	expect.Text(t, out.String(), "| 4 x 8 | ")
	expect.Text(t, out.String(), " | 300 | 12 | ")
	expect.Text(t, out.String(), "| 1 workers in ")
	expect.Equal(t, len(must.Get(os.ReadDir(dir))(t)), 0)
}
