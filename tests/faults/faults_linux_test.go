// SPDX-License-Identifier: Apache-2.0

// Package faults_test runs a server while random system calls of its store and of its sandbox setup fail. strace
// injects the errors, so the released program is tested. Every result must be correct and every error clear, nothing
// may leak, the server must recover by itself, and after a restart it must have everything that it acknowledged.
package faults_test

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/program"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/syncbuf"
)

var (
	duration = flag.Duration("faults", 0, "duration of random faults, which follow those that have found bugs")
	seed     = flag.Uint64("seed", 0, "seed of the faults; 0 means a random seed")
	built    program.Program
)

func TestMain(m *testing.M) { os.Exit(built.Main(m)) }

// roundTime is the duration of one choice of faults.
const roundTime = 3 * time.Second

// A rig is a server with a load, and counts what was done to it.
type rig struct {
	*testing.T
	random *rand.Rand
	config bazelrun.ServerConfig
	log    syncbuf.Buffer
	server *bazelrun.Server
	load   *load
	idle   census // of the server before any fault
	faults map[string]int
	rounds int
	starts int // with faults
	stops  int
}

func TestServerSurvivesFaults(t *testing.T) {
	if _, err := exec.LookPath("strace"); err != nil {
		sandboxtest.Unavailable(t, "strace", err)
	}
	if out, err := strace(os.DevNull, "-e", "inject=getpid:error=EIO", "true").CombinedOutput(); err != nil {
		sandboxtest.Unavailable(t, "strace", fmt.Sprintf("it cannot inject: %v: %s", err, out))
	}
	if err := bazelrun.Confines(t.Context(), built.Path(t), nil); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	for *seed == 0 {
		*seed = rand.Uint64()
	}
	dir := must.Get(bazelrun.TempDir(nil))(t)
	t.Cleanup(func() {
		expect.Error(t, bazelrun.Remove(dir), nil)
	})
	r := &rig{T: t, random: rand.New(rand.NewPCG(*seed, 0)), faults: map[string]int{}}
	r.config = bazelrun.ServerConfig{
		Binary: built.Path(t), Dir: filepath.Join(dir, "store"), Home: dir, Listen: "127.0.0.1:0", Jobs: 2,
		Log: io.MultiWriter(&r.log),
	}
	defer r.report()
	r.start()
	for end := time.Now().Add(*duration); (r.rounds < len(found) || time.Now().Before(end)) && !t.Failed(); {
		r.round()
		if r.rounds%5 == 0 {
			r.stop(r.rounds%2 == 0)
			r.startWithFaults()
			r.start()
		}
	}
	r.stop(true)
}

// report logs what was done.
func (r *rig) report() {
	total := 0
	for _, n := range r.faults {
		total += n
	}
	r.Logf("seed %d: %d rounds, %d stops, %d starts with faults, %d faults: %v", *seed, r.rounds, r.stops, r.starts, total, r.faults)
	if r.load != nil {
		r.Logf("%d blobs acknowledged, %d correct results, errors of writes %v, of actions %v",
			len(r.load.acknowledged), r.load.executed, r.load.failed, r.load.refused)
	}
	if text := r.log.String(); r.Failed() {
		r.Logf("the log of the server ends with\n%s", text[max(0, len(text)-64<<10):])
	}
}

// start starts the server without faults, and checks that it has everything that was acknowledged.
func (r *rig) start() {
	r.Helper()
	var err error
	config := r.config
	if r.rounds == 0 || r.random.IntN(2) == 0 {
		config.Args = []string{"--sync"}
	}
	r.server, err = bazelrun.StartServer(r.Context(), config)
	must.Succeed(r.T, err)
	r.Cleanup(r.server.Kill)
	r.load = dial(r.T, r.server.Addr, r.load)
	must.Succeed(r.T, r.load.wantRecovered(r.Context())) // the first time, this records the output
	r.load.wantAcknowledged()
	r.loadFor(roundTime)() // fills all slots
	r.idle = take(r.server.PID)
}

// round loads the server while some of its calls fail, and checks that it recovers and that nothing is left.
func (r *rig) round() {
	r.Helper()
	sandbox, faults := r.rounds%2 == 0, storeFaults
	if sandbox {
		faults = sandboxFaults
	}
	args := choose(r.random, faults)
	if r.rounds < len(found) {
		sandbox, args = found[r.rounds].sandbox, always(found[r.rounds].fault)
	}
	r.rounds++
	pids := []int{r.server.PID}
	if sandbox {
		pids = tree(r.server.PID)[1:]
	}
	end := inject(r.T, args, pids)
	wait := r.loadFor(roundTime)
	r.add(end())
	wait()
	if err := r.load.wantRecovered(r.Context()); err != nil {
		r.Errorf("the server does not recover: %v", err)
	}
	if now, ok := awaitWithin(r.server.PID, r.idle); !ok {
		r.Errorf("leak: got %+v, at first %+v", now, r.idle)
	}
	r.wantNoPanic(r.log.String())
}

// loadFor loads the server for a time. The returned function waits for the calls that have begun.
func (r *rig) loadFor(d time.Duration) (wait func()) {
	ctx, cancel := context.WithTimeout(r.Context(), d)
	done := make(chan struct{})
	go func() { defer close(done); r.load.run(ctx) }()
	<-ctx.Done()
	cancel()
	return func() { <-done }
}

func (r *rig) add(faults map[string]int) {
	for call, n := range faults {
		r.faults[call] += n
	}
}

// wantNoPanic checks the output of a server. A helper process may end with its runtime, since that needs clone.
func (r *rig) wantNoPanic(text string) {
	r.Helper()
	if strings.Contains(text, "panic") {
		r.Errorf("the server panics: %s", text)
	}
}

// stop ends the server and checks that nothing is left.
func (r *rig) stop(kill bool) {
	r.Helper()
	all, pid := tree(r.server.PID), r.server.PID
	if r.stops++; kill {
		r.server.Kill()
	} else if err := r.server.Stop(); err != nil {
		r.Errorf("stop: %v", err)
	}
	r.wantGone(all)
	if left := groups(pid); len(left) > 0 && !kill { // the next server removes those of a killed one
		r.Errorf("control groups are left: %v", left)
	}
}

// wantGone checks that processes end.
func (r *rig) wantGone(pids []int) {
	r.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		var left []string
		for _, pid := range pids {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			if err == nil && !strings.Contains(string(b), ") Z ") {
				left = append(left, string(b))
			}
		}
		if len(left) == 0 {
			return
		}
		if time.Now().After(end) {
			r.Errorf("processes are left: %q", left)
			return
		}
	}
}

// startWithFaults starts the server while its calls fail. It may refuse to start, with a reason.
func (r *rig) startWithFaults() {
	r.Helper()
	r.starts++
	dir := r.TempDir()
	wrapper, trace := filepath.Join(dir, "cloister"), filepath.Join(dir, "trace")
	faults := storeFaults
	if r.random.IntN(2) == 0 {
		faults = sandboxFaults[1:] // without clone, which the server's own runtime needs
	}
	args := strings.Join(strace(trace, append([]string{"-D"}, choose(r.random, faults)...)...).Args, " ")
	must.Succeed(r.T, os.WriteFile(wrapper, []byte("#!/bin/sh\nexec "+args+" "+r.config.Binary+` "$@"`+"\n"), 0o700))
	r.Logf("start: %s", args)
	config := r.config
	config.Binary = wrapper
	server, err := bazelrun.StartServer(r.Context(), config)
	if err == nil {
		all := tree(server.PID)
		if err := server.Stop(); err != nil {
			r.Errorf("stop a server that was started with faults: %v", err)
		}
		r.wantGone(all)
	} else {
		r.wantNoPanic(err.Error())
		if !strings.Contains(err.Error(), "cloister: ") {
			r.Errorf("the server does not start, without a reason: %v", err)
		}
	}
	r.add(injected(r.T, trace))
}
