// SPDX-License-Identifier: Apache-2.0

package upgrade_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/program"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/syncbuf"
)

// built is the program of this tree.
var built program.Program

func TestMain(m *testing.M) { os.Exit(built.Main(m)) }

// confined skips the test where this machine lacks the sandbox.
func confined(t *testing.T) {
	t.Helper()
	if err := bazelrun.Confines(t.Context(), built.Path(t), nil); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
}

// TestServeShowsRecordedStores checks what only serve reads: the builds, the drains, and without an upstream the number
// of unsent writes.
func TestServeShowsRecordedStores(t *testing.T) {
	for _, r := range recordings {
		if !r.readable {
			continue
		}
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			confined(t)
			dir, want := unpack(t, archiveOf(r.name))
			var log syncbuf.Buffer
			s := must.Get(bazelrun.StartServer(t.Context(), bazelrun.ServerConfig{
				Binary: built.Path(t), Dir: dir, Home: t.TempDir(), Listen: "127.0.0.1:0", MaxSize: "1GiB", Toolchain: "upgrade", Log: &log,
			}))(t)
			defer s.Kill()
			show := func(args ...string) string {
				t.Helper()
				out, err := exec.CommandContext(t.Context(), built.Path(t), append(args, "--server", "grpc://"+s.Addr)...).CombinedOutput()
				var exit *exec.ExitError
				must.Be(t, err == nil || errors.As(err, &exit), "cloister %q: %v", args, err)
				return string(out)
			}
			status := show("status", "--json")
			if want.Drain == "" {
				expect.Text(t, status, `"state": "working"`)
			} else {
				expect.Texts(t, status, []string{`"state": "drained"`, fmt.Sprintf(`"reason": %q`, want.Drain)})
			}
			if want.Build != "" {
				expect.Texts(t, show("invocation", "show", want.Build, "--instance", "main", "--json"), []string{want.Build, `"/upgrade"`, `"9.0.0"`})
			}
			if want.Pending != "" {
				expect.Text(t, log.String(), "upstream.journal")
			}
			must.Succeed(t, s.Stop())
		})
	}
}

// TestPipesDoNotBlockTheStart replaces each kind of file and directory in a store by a pipe without a reader or
// writer: serve starts without the file, or ends and names it.
func TestPipesDoNotBlockTheStart(t *testing.T) {
	last := archiveOf(recordings[len(recordings)-1].name)
	store, _ := unpack(t, last)
	names := map[string]string{} // by kind
	for _, name := range []string{"lock", "audit/lock", "control"} {
		names[name], names[name+".new"] = name, name+".new"
	}
	must.Succeed(t, filepath.WalkDir(store, func(path string, e fs.DirEntry, err error) error {
		if err != nil || path == store {
			return err
		}
		name, err := filepath.Rel(store, path)
		if kind := withoutValues(filepath.ToSlash(name)); e.IsDir() {
			names[kind] = name
		} else {
			names[kind], names[kind+".new"] = name, name+".new"
		}
		return err
	}))
	for kind, name := range names {
		if slices.ContainsFunc(cas.Functions(), func(f cas.Function) bool {
			return f != cas.SHA256 && strings.Contains(name+"/", "/"+f.String()+"/")
		}) {
			continue // all functions are alike
		}
		t.Run(strings.ReplaceAll(kind, "/", "_"), func(t *testing.T) {
			t.Parallel()
			dir, _ := unpack(t, last)
			path := filepath.Join(dir, name)
			must.Succeed(t, os.RemoveAll(path))
			must.Succeed(t, syscall.Mkfifo(path, 0o600))
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			s, err := bazelrun.StartServer(ctx, bazelrun.ServerConfig{
				Binary: built.Path(t), Dir: dir, Home: t.TempDir(), Listen: "127.0.0.1:0", MaxSize: "1GiB", NoJobs: true,
			})
			if err == nil {
				must.Succeed(t, s.Stop())
				return
			}
			must.Be(t, ctx.Err() == nil, "serve hangs: %v", err)
			expect.Text(t, err.Error(), filepath.Base(path))
		})
	}
}
