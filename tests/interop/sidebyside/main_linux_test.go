// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/interop/peers"
)

func TestSideBySideMeasuresEveryServer(t *testing.T) {
	for _, k := range peers.Kinds() {
		if _, err := k.Build(t.Context()); err != nil {
			sandboxtest.Unavailable(t, "interop", err)
		}
	}
	program, err := peers.BuildCloister(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := bazelrun.Confines(t.Context(), program, nil); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	file := filepath.Join(t.TempDir(), "report.json")
	var out, info bytes.Buffer
	flags := []string{"blobs", "--blobs", "300", "--large", "8MiB", "--lookups", "2000", "--rounds", "2", "--zstd", "--verify", "--report", file}
	if err := sideBySide(t.Context(), program, t.TempDir(), 1<<30, flags, &out, &info); err != nil {
		t.Fatalf("%v\n%s%s", err, out.String(), info.String())
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var report struct {
		Servers []struct {
			Name  string
			Steps []struct{ Step string }
			Peak  int64 `json:"peak_rss_bytes"`
		}
	}
	if err := json.Unmarshal(b, &report); err != nil {
		t.Fatal(err)
	}
	if len(report.Servers) != 2+len(peers.Kinds()) {
		t.Fatalf("%d servers were measured, want %d", len(report.Servers), 2+len(peers.Kinds()))
	}
	const steps, zstd = 7, 4
	for _, s := range report.Servers {
		if n := len(s.Steps); n != steps && n != steps+zstd || s.Peak == 0 {
			t.Errorf("%s: %d steps, peak memory %d; want all steps and a peak", s.Name, n, s.Peak)
		}
	}
	t.Logf("\n%s", out.String())
}

func TestBucketIsMeasuredWhenIdle(t *testing.T) {
	if _, err := peers.VersityGW.Build(t.Context()); err != nil {
		sandboxtest.Unavailable(t, "interop", err)
	}
	program, err := peers.BuildCloister(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := bazelrun.Confines(t.Context(), program, nil); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	for _, bench := range [][]string{
		{"blobs", "--blobs", "100", "--large", "1MiB", "--lookups", "100", "--rounds", "1", "--settle"},
		{"noop", "--actions", "10", "--rounds", "1", "--settle"},
	} {
		var out, info bytes.Buffer
		if err := withBucket(t.Context(), program, t.TempDir(), 1<<30, bench, &out, &info); err != nil {
			t.Fatalf("%v\n%s%s", err, out.String(), info.String())
		}
		t.Logf("\n%s", out.String())
	}
}
