// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/interop/peers"
	"github.com/cloister-build/cloister/tests/must"
)

// runner starts cloister runner for a build directory and returns its address.
func runner(t *testing.T, build string) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "runner")
	p := confining(t, "runner", "--socket", socket, "--build-dir", build, "--jobs", "2")
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if conn, err := net.Dial("unix", socket); err == nil {
			conn.Close()
			return "unix:" + socket
		}
		select {
		case <-p.ended:
			t.Fatalf("cloister runner ended: %v", p.err)
		default:
		}
		must.Be(t, !time.Now().After(deadline), "cloister runner does not listen on %s", socket)
	}
}

// confined starts a Buildbarn worker with cloister runner in the farm.
func (b *buildbarn) confined(t *testing.T, flags ...string) {
	t.Helper()
	build := t.TempDir()
	worker(t, peers.Options{
		Scheduler: b.scheduler.Addr, Store: b.store.Addr, Build: build, Runner: runner(t, build), Args: flags,
	})
}

func TestRunnerReplacesBuildbarnsRunner(t *testing.T) {
	b := farm(t)
	b.confined(t, "-property", "os=linux", "-id", "host=one", "-threads", "2")
	wantExecutes(t, b.scheduler.Addr, "")
}

// TestRunnerConfinesBuildbarnsActions: an action that finds a file of the host with bb_runner finds none with cloister
// runner, cannot change its inputs, and delivers its output.
func TestRunnerConfinesBuildbarnsActions(t *testing.T) {
	host := filepath.Join(t.TempDir(), "host")
	must.Succeed(t, os.WriteFile(host, nil, 0o644))
	const sees, changes = 10, 11
	script := fmt.Sprintf(`if test -e %s; then exit %d; fi
if echo other > in/name; then exit %d; fi
cp in/name out/copy`, host, sees, changes)
	for _, c := range []struct {
		name   string
		worker func(b *buildbarn, t *testing.T)
		exit   int32
	}{
		{"bb_runner", func(b *buildbarn, t *testing.T) { b.worker(t, "-property", "os=linux") }, sees},
		{"cloister", func(b *buildbarn, t *testing.T) { b.confined(t, "-property", "os=linux") }, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := farm(t)
			c.worker(b, t)
			store := dial(t, b.scheduler, "")
			response, err := execute(t.Context(), b.scheduler.Addr, "", action(t, store, script, time.Minute))
			if err != nil || response.GetStatus().GetCode() != 0 || response.GetResult().GetExitCode() != c.exit {
				t.Fatalf("response is %v, %v, want exit code %d", response, err, c.exit)
			}
			if c.exit != 0 {
				return
			}
			if files := response.GetResult().GetOutputFiles(); len(files) != 1 || content(t, store, files[0].Digest) != "an input\n" {
				t.Errorf("outputs are %v, want a copy of the input", files)
			}
		})
	}
}

func TestBazelBuildsWithRunner(t *testing.T) {
	b := farm(t)
	b.confined(t, "-threads", "2")
	wantBazel(t, b.scheduler.Addr)
}
