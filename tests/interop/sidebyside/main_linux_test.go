// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/interop/peers"
	"github.com/cloister-build/cloister/tests/must"
)

func TestSideBySideMeasuresEveryServer(t *testing.T) {
	for _, k := range peers.Kinds() {
		if _, err := k.Build(t.Context()); err != nil {
			sandboxtest.Unavailable(t, "interop", err)
		}
	}
	program := must.Get(peers.BuildCloister(t.Context()))(t)
	if err := bazelrun.Confines(t.Context(), program, nil); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	var out, info bytes.Buffer
	flags := []string{"blobs", "--blobs", "300", "--large", "8MiB", "--rounds", "2"}
	if err := (network{}).sideBySide(t.Context(), program, t.TempDir(), 1<<30, flags, &out, &info); err != nil {
		t.Fatalf("%v\n%s%s", err, out.String(), info.String())
	}
	names := []string{"cloister", "cloister-sync"}
	for _, k := range peers.Kinds() {
		names = append(names, k.Name)
	}
	for _, want := range []string{
		strings.Join(names, `\s+`), "small batch write", "small batch read", "small stream write", "small stream read", "find missing",
		"large stream write", "large stream read", "peak memory",
	} {
		line := regexp.MustCompile(`(?m)^\s*` + want + `\s.*$|^\s*` + want + `$`).FindString(out.String())
		figures := len(regexp.MustCompile(`[1-9][0-9]* (/s|MiB/s|MiB)`).FindAllString(line, -1))
		if line == "" || want != strings.Join(names, `\s+`) && figures != len(names) {
			t.Errorf("%s: got %q, want a figure for each of %q", want, line, names)
		}
	}
	t.Logf("\n%s", out.String())
}

func TestBucketIsMeasuredWhenIdle(t *testing.T) {
	if _, err := peers.VersityGW.Build(t.Context()); err != nil {
		sandboxtest.Unavailable(t, "interop", err)
	}
	program := must.Get(peers.BuildCloister(t.Context()))(t)
	if err := bazelrun.Confines(t.Context(), program, nil); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	for _, bench := range [][]string{
		{"blobs", "--blobs", "100", "--large", "1MiB", "--rounds", "1", "--settle"},
		{"noop", "--actions", "10", "--rounds", "1", "--settle"},
	} {
		var out, info bytes.Buffer
		if err := withBucket(t.Context(), program, t.TempDir(), 1<<30, bench, &out, &info); err != nil {
			t.Fatalf("%v\n%s%s", err, out.String(), info.String())
		}
		t.Logf("\n%s", out.String())
	}
}

func TestBuildsAreMeasured(t *testing.T) {
	if err := bazelrun.Find(); err != nil {
		sandboxtest.Unavailable(t, "bazel", err)
	}
	if _, err := peers.BazelRemote.Build(t.Context()); err != nil {
		sandboxtest.Unavailable(t, "interop", err)
	}
	program := must.Get(peers.BuildCloister(t.Context()))(t)
	if err := bazelrun.Confines(t.Context(), program, nil); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	var out, info bytes.Buffer
	n := network{rtt: time.Millisecond}
	if err := n.buildWith(t.Context(), program, t.TempDir(), 1<<30, []string{"//examples/hash:adler32"}, &out, &info); err != nil {
		t.Fatalf("%v\n%s%s", err, out.String(), info.String())
	}
	for _, s := range setups {
		cells := strings.Repeat(` [0-9.]+ s, [0-9.]+ MB \|`, 2) + ` [0-9.]+ s, [0-9.]+ MB \|$`
		if s.cache {
			cells = strings.Repeat(` [0-9.]+ s, [0-9.]+ MB \|`, 2) + `  \|$`
		}
		want := `(?m)^\| ` + regexp.QuoteMeta(s.name) + ` \|` + cells
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("got\n%swant a row like %s", &out, want)
		}
	}
}
