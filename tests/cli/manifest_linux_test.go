// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/bazelbuild/remote-apis-sdks/go/pkg/client"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// compiles builds a program, leaves several kinds of outputs in one directory, and runs a script.
const compiles = `mkdir out && printf '#!/usr/bin/env sh\necho made\n' > out/run && chmod +x out/run && ln -s run out/link && ./out/run && sort input > out/sorted`

// servingAs starts a server as another user with a separate home and store; it ends with the test. Ordinary users start it as
// themselves.
func servingAs(t *testing.T, instance string, id uint32) *remote {
	t.Helper()
	var user *syscall.Credential
	if os.Getuid() == 0 {
		user = &syscall.Credential{Uid: id, Gid: id}
	}
	dir, err := bazelrun.TempDir(user)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := bazelrun.Remove(dir); err != nil {
			t.Error(err)
		}
	})
	// The other user cannot read the test's directory.
	program, err := os.ReadFile(built.Path(t))
	if err != nil {
		t.Fatal(err)
	}
	binary := filepath.Join(dir, "cloister")
	if err := os.WriteFile(binary, program, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := bazelrun.Confines(t.Context(), binary, user); err != nil {
		sandboxtest.Unavailable(t, "unprivileged", err)
	}
	var log bytes.Buffer
	s, err := bazelrun.StartServer(t.Context(), bazelrun.ServerConfig{
		Binary: binary, Dir: filepath.Join(dir, "another", "store"), Home: dir, Listen: "127.0.0.1:0", User: user, Log: &log,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	c, err := client.NewClient(t.Context(), instance, client.DialParams{Service: s.Addr, NoSecurity: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &remote{c, "grpc://" + s.Addr, dir, &log}
}

// TestStableHashIsEqualOnTwoServers compares servers of different users with different paths, names and instances.
func TestStableHashIsEqualOnTwoServers(t *testing.T) {
	one, two := serving(t, "main"), servingAs(t, "other", 64_017)
	for _, script := range []string{compiles, "exit 7", "cat input >&2; echo x > undeclared"} {
		a, b := recorded(t, one, script), recorded(t, two, script)
		if a.StableHash() != b.StableHash() {
			t.Errorf("%s: got different stable parts: %+v", script, manifest.Diff(a, b))
		}
		if a.Text() == b.Text() {
			t.Errorf("%s: got equal manifests, want different volatile parts", script)
		}
	}
}

// recorded executes a script on a server and returns the run's manifest.
func recorded(t *testing.T, r *remote, script string) *manifest.Manifest {
	t.Helper()
	_, response := r.execute(t, script)
	var e cloisterpb.Execution
	if err := response.Result.ExecutionMetadata.AuxiliaryMetadata[0].UnmarshalTo(&e); err != nil {
		t.Fatal(err)
	}
	text := wantOutput(t, 0, []string{"cas", "cat", e.Manifest, "--cas", r.cas, "--instance", r.InstanceName}).out
	m, err := manifest.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if m.StableHash() != e.StableHash || !m.Toolchain.Complete {
		t.Errorf("got metadata %v for\n%s", &e, text)
	}
	return m
}

// TestActionShowsItsManifest checks that the SHA-256 of the printed stable part is the stable hash.
func TestActionShowsItsManifest(t *testing.T) {
	r := serving(t, "main")
	at := func(args ...string) []string { return append(args, "--cas", r.cas, "--instance", "main") }
	action, response := r.execute(t, compiles)
	show := wantOutput(t, 0, at("action", "show", action)).out
	text := wantOutput(t, 0, at("action", "show", action, "--manifest"),
		"cloister-manifest v1\n", "action sha256:"+action, "\noutput \"out\" tree sha256:", "toolchain program \"/usr/bin/sort\"", "toolchain program \"/usr/bin/env\"",
		"toolchain programs complete\n", "\nexit 0\n", "\nvolatile\n").out
	stable, _, _ := strings.Cut(text, "volatile\n")
	hash := fmt.Sprintf("%x", sha256.Sum256([]byte(stable)))
	digest := cas.SHA256.Sum([]byte(text)).String()
	for _, line := range []string{"stable hash  " + hash, "manifest     " + digest} {
		if !strings.Contains(show, line+"\n") {
			t.Errorf("got\n%s\nwant %q in it", show, line)
		}
	}
	// Without a result there is no manifest.
	failed, _ := r.execute(t, "exit 3")
	wantOutput(t, 4, at("action", "show", failed, "--manifest"), "no result")
	wantOutput(t, 2, at("action", "show", action, "--manifest", "--json"))

	// Results of foreign workers name no manifest; a manifest of another action is refused.
	record := func(change func(*repb.ActionResult)) {
		result := response.Result
		change(result)
		hash, size, _ := strings.Cut(action, "/")
		var n int64
		fmt.Sscan(size, &n)
		if _, err := r.Client.UpdateActionResult(t.Context(), &repb.UpdateActionResultRequest{
			InstanceName: "main", ActionDigest: &repb.Digest{Hash: hash, SizeBytes: n}, ActionResult: result,
		}); err != nil {
			t.Fatal(err)
		}
	}
	var e cloisterpb.Execution
	aux := response.Result.ExecutionMetadata.AuxiliaryMetadata[0]
	if err := aux.UnmarshalTo(&e); err != nil {
		t.Fatal(err)
	}
	e.StableHash = strings.Repeat("0", 64)
	record(func(*repb.ActionResult) {
		if err := aux.MarshalFrom(&e); err != nil {
			t.Fatal(err)
		}
	})
	wantOutput(t, 1, at("action", "show", action, "--manifest"), "stable hash")
	record(func(r *repb.ActionResult) { r.ExecutionMetadata.AuxiliaryMetadata = nil })
	wantOutput(t, 4, at("action", "show", action, "--manifest"), "names no manifest")
}
