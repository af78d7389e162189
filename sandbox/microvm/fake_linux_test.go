// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/cgroup"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// A fakeGuest is the guest of a machine that is only a process which sleeps.
type fakeGuest struct {
	run     func(*guest, *runRequest) // called for each run; nil reads nothing of the request but its length
	started chan struct{}             // closed at the first run
	probed  func()                    // called for each probe, which is not answered
	process string                    // script of the process, by default one that sleeps
}

// command returns the command of the machine, and starts the guest, which ends with the machine.
func (f *fakeGuest) command(_ *machine, theirs []*os.File) (*exec.Cmd, error) {
	g := &guest{}
	for i, file := range theirs {
		fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err == nil {
			err = unix.SetNonblock(fd, true)
		}
		if err != nil {
			return nil, err
		}
		g.ports[i] = newPort(os.NewFile(uintptr(fd), portName(i)))
	}
	go f.serve(g)
	return exec.Command("sh", "-c", cmp.Or(f.process, "exec sleep 600")), nil
}

func (f *fakeGuest) serve(g *guest) {
	control := g.ports[portControl]
	err := control.sendMessage(answer{})
	for err == nil {
		var r request
		if f.run == nil {
			if _, err = io.ReadFull(control.in, make([]byte, 4)); err == nil {
				close(f.started)
				break
			}
		}
		err = control.receiveMessage(&r, maxMessage)
		if err == nil && r.Probe {
			f.probed()
		}
		if err == nil && r.Run != nil {
			if f.started != nil {
				close(f.started)
				f.started = nil
			}
			f.run(g, r.Run)
		}
	}
	// Without this, the ports would be closed when they are collected as garbage.
	if f.run == nil {
		_, _ = io.Copy(io.Discard, g.ports[portStderr].in) // ends with the machine
	}
	for _, p := range g.ports {
		p.file.Close()
	}
}

// fakeBackend returns a backend whose machines have fake guests: one guest per machine, and the last guest for all
// further ones.
func fakeBackend(t *testing.T, emulated bool, guests ...*fakeGuest) *backend {
	t.Helper()
	if os.Geteuid() != 0 {
		sandboxtest.Unavailable(t, "root", "the backend needs root")
	}
	b, _ := NewQEMU(emulated).(*backend)
	b.program = "fake"
	b.features = &sandbox.Features{Audits: []sandbox.Audit{sandbox.AuditOff, sandbox.AuditViolations}, Limits: sandbox.AllLimits, ListenControl: true}
	for i := range cap(b.turns) {
		b.cells = append(b.cells, &cell{number: i})
	}
	b.made = len(b.cells)
	b.times = times{stop: 20 * time.Millisecond, late: 20 * time.Millisecond, copy: time.Minute, end: time.Minute}
	b.command = func(m *machine, theirs []*os.File) (*exec.Cmd, error) {
		f := guests[0]
		if len(guests) > 1 {
			guests = guests[1:]
		}
		return f.command(m, theirs)
	}
	t.Cleanup(func() { must.Succeed(t, b.Close()) })
	return b
}

// succeed answers as a guest whose command exits with code 3.
func succeed(g *guest, _ *runRequest) {
	for _, i := range []int{portStdout, portStderr} {
		_ = g.ports[i].end() // the host may have gone
	}
	_ = g.ports[portControl].sendMessage(answer{Result: &sandbox.Result{ExitCode: 3}})
	_, _ = g.ports[portStdout].copyTo(&strings.Builder{})
}

func plainSpec(args ...string) *sandbox.Spec {
	return &sandbox.Spec{Args: append([]string{"/x"}, args...), Dir: "/", Limits: sandboxtest.Limits(), Timeout: time.Minute}
}

// TestMachinesThatHangAreKilled: whatever a guest does not do, runs end with their timeout, their context and their
// backend, and the next run has another machine.
func TestMachinesThatHangAreKilled(t *testing.T) {
	const huge = 600 << 10  // bytes of arguments, more than a socket holds
	const either = "either" // an error or a stopped run
	block := make(chan struct{})
	t.Cleanup(func() { close(block) })
	hang := func(*guest, *runRequest) { <-block }
	silent := func(g *guest, _ *runRequest) {
		_ = g.ports[portControl].sendMessage(answer{Result: &sandbox.Result{}})
		<-block
	}
	for name, c := range map[string]struct {
		guest fakeGuest
		args  int
		end   string // what ends the run: its timeout, its context, Close, or the limit of copies
		want  string // in the error; otherwise the run was stopped
	}{
		"no answer":                 {fakeGuest{run: hang}, 0, "timeout", ""},
		"no answer, cancelled":      {fakeGuest{run: hang}, 0, "context", ""},
		"no answer, closed":         {fakeGuest{run: hang}, 0, "close", sandbox.ErrClosed.Error()},
		"stopped process":           {fakeGuest{run: hang, process: "kill -STOP $$"}, 0, "context", ""},
		"reads nothing":             {fakeGuest{}, huge, "copy", errOverdue.Error()},
		"reads nothing, cancelled":  {fakeGuest{}, huge, "context", ""},
		"reads nothing, closed":     {fakeGuest{}, huge, "close", sandbox.ErrClosed.Error()},
		"no end of streams":         {fakeGuest{run: silent}, 0, "copy", errOverdue.Error()},
		"no end of streams, closed": {fakeGuest{run: silent}, 0, "close", sandbox.ErrClosed.Error()},
		"no end, cancelled":         {fakeGuest{run: silent}, 0, "context", either},
		"malformed answer": {
			fakeGuest{run: func(g *guest, _ *runRequest) { _ = g.ports[portControl].send([]byte("{")) }},
			0, "",
			"unexpected end of JSON",
		},
		"endless answer": {fakeGuest{run: func(g *guest, _ *runRequest) {
			_, _ = g.ports[portControl].file.Write([]byte{0xff, 0xff, 0xff, 0xff})
		}}, 0, "", "a frame of"},
	} {
		t.Run(name, func(t *testing.T) {
			started := make(chan struct{})
			c.guest.started = started
			b := fakeBackend(t, false, &c.guest, &fakeGuest{run: succeed})
			if c.end == "copy" {
				b.times.copy = 20 * time.Millisecond
			}
			s := plainSpec(strings.Repeat("x ", c.args/2))
			if c.end == "timeout" {
				s.Timeout = time.Millisecond
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			go func() {
				<-started
				switch c.end {
				case "context":
					cancel()
				case "close":
					b.Close()
				}
			}()
			res, err := b.Run(ctx, s, sandbox.Stdio{})
			switch {
			case c.want == either: // it depends on which is noticed first
			case c.want != "" && (err == nil || res != nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("got %+v, %v, want an error with %q", res, err, c.want)
			case c.want == "" && (err != nil || !res.Stopped || res.ExitCode != 137):
				t.Errorf("got %+v, %v, want a stopped run", res, err)
			}
			b.times.copy = time.Minute
			res, err = b.Run(t.Context(), plainSpec(), sandbox.Stdio{})
			if c.end == "close" && !errors.Is(err, sandbox.ErrClosed) || c.end != "close" && (err != nil || res.ExitCode != 3) {
				t.Errorf("the next run: got %+v, %v, want exit code 3, or ErrClosed after Close", res, err)
			}
		})
	}
}

// TestProbesThatHangEnd: a guest that does not answer the probe delays neither Close nor callers that give up.
func TestProbesThatHangEnd(t *testing.T) {
	for _, cancelled := range []bool{false, true} {
		ctx, cancel := context.WithCancel(t.Context())
		probed := make(chan struct{})
		b := fakeBackend(t, false, &fakeGuest{run: succeed, probed: func() { close(probed) }})
		b.features = nil
		go func() {
			<-probed
			if cancelled {
				cancel()
			} else {
				b.Close()
			}
		}()
		want := sandbox.ErrClosed
		if cancelled {
			want = context.Canceled
		}
		if res, err := b.Run(ctx, plainSpec(), sandbox.Stdio{}); res != nil || !errors.Is(err, want) {
			t.Errorf("got %+v, %v, want %v", res, err, want)
		}
		cancel()
	}
}

// countBoots counts the machines that a backend boots.
func countBoots(b *backend) *atomic.Int32 {
	boots, command := &atomic.Int32{}, b.command
	b.command = func(m *machine, theirs []*os.File) (*exec.Cmd, error) {
		boots.Add(1)
		return command(m, theirs)
	}
	return boots
}

// TestMachinesServeOneRun: each run has a machine of its own, so that none can attack another. Only emulated ones,
// which are no boundary, are kept.
func TestMachinesServeOneRun(t *testing.T) {
	for emulated, want := range map[bool]int32{false: 3, true: 1} {
		b := fakeBackend(t, emulated, &fakeGuest{run: succeed})
		boots := countBoots(b)
		for range 3 {
			if res, err := b.Run(t.Context(), plainSpec(), sandbox.Stdio{}); err != nil || res.ExitCode != 3 {
				t.Fatalf("got %+v, %v, want exit code 3", res, err)
			}
		}
		if got := boots.Load(); got != want {
			t.Errorf("emulated %t: got %d machines for three runs, want %d", emulated, got, want)
		}
		if kept := len(b.idle); kept != 1 && emulated || kept != 0 && !emulated {
			t.Errorf("emulated %t: %d machines are kept", emulated, kept)
		}
		for _, m := range b.idle {
			limits := string(must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/limits", m.process.Pid)))(t))
			if !regexp.MustCompile(`Max core file size +[01] `).MatchString(limits) {
				t.Errorf("core dumps are not limited:\n%s", limits)
			}
			must.Hold(t, "the kept machine is stopped", func() bool {
				text := string(must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/stat", m.process.Pid)))(t))
				return strings.Contains(text, ") T ")
			})
		}
	}
}

// TestDeadMachinesAreReplaced: a machine that ends while it is idle fails no run.
func TestDeadMachinesAreReplaced(t *testing.T) {
	b := fakeBackend(t, true, &fakeGuest{run: succeed})
	boots := countBoots(b)
	for i := range 2 {
		if res, err := b.Run(t.Context(), plainSpec(), sandbox.Stdio{}); err != nil || res.ExitCode != 3 {
			t.Fatalf("run %d: got %+v, %v, want exit code 3", i, res, err)
		}
		must.Succeed(t, b.idle[0].process.Kill())
		<-b.idle[0].ended
	}
	if boots.Load() != 2 || len(b.cells) != cap(b.turns)-1 {
		t.Errorf("got %d machines and %d free cells, want 2 and %d", boots.Load(), len(b.cells), cap(b.turns)-1)
	}
}

// TestMalformedRequestsEndTheMachine: a machine whose files are not served any more does not stay.
func TestMalformedRequestsEndTheMachine(t *testing.T) {
	b := fakeBackend(t, true, &fakeGuest{run: func(g *guest, r *runRequest) {
		_, _ = g.ports[portFiles].file.Write([]byte{1, 0, 0, 0})
		succeed(g, r)
	}}, &fakeGuest{run: succeed})
	_, _ = b.Run(t.Context(), plainSpec(), sandbox.Stdio{}) // which of both is noticed first does not matter
	if len(b.idle) > 0 {
		<-b.idle[0].ended
	}
	if res, err := b.Run(t.Context(), plainSpec(), sandbox.Stdio{}); err != nil || res.ExitCode != 3 {
		t.Errorf("the next run: got %+v, %v, want exit code 3", res, err)
	}
}

// TestLostCellsAreNotReused: the user and the control group of a QEMU that may be alive serve no other machine.
func TestLostCellsAreNotReused(t *testing.T) {
	b := fakeBackend(t, false, &fakeGuest{run: succeed})
	b.made = zygote.MaxSlots
	for len(b.cells) > 0 {
		c, err := b.takeCell()
		must.Succeed(t, err)
		c.lost = true
		b.putCell(c)
	}
	if res, err := b.Run(t.Context(), plainSpec(), sandbox.Stdio{}); err == nil || !strings.Contains(err.Error(), "virtual machines; lost ones count") {
		t.Errorf("got %+v, %v, want an error", res, err)
	}
}

// TestGuestsCannotCancel: an error of the guest means what it says only where that cannot mislead callers.
func TestGuestsCannotCancel(t *testing.T) {
	for kind, want := range map[string]error{kindStopped: nil, "unknown": nil, "spec": sandbox.ErrSpec, "unsupported": sandbox.ErrUnsupported} {
		b := fakeBackend(t, false, &fakeGuest{run: func(g *guest, _ *runRequest) {
			_ = g.ports[portStdout].end() // the host may have gone
			_ = g.ports[portStderr].end()
			_ = g.ports[portControl].sendMessage(answer{Error: "text\x1b[2J\n", Kind: kind})
		}})
		res, err := b.Run(t.Context(), plainSpec(), sandbox.Stdio{})
		if res != nil || err == nil || err.Error() != `text\x1b[2J\n` || want != nil && !errors.Is(err, want) || errors.Is(err, context.Canceled) {
			t.Errorf("%s: got %+v, %v, want an error that is %v", kind, res, err, want)
		}
	}
}

// TestEqualWritersAreNotWrittenToAtOnce: a guest that sends stderr although it is to send both streams on one port does
// not reach the writer from two goroutines.
func TestEqualWritersAreNotWrittenToAtOnce(t *testing.T) {
	b := fakeBackend(t, false, &fakeGuest{run: func(g *guest, r *runRequest) {
		for _, i := range []int{portStderr, portStdout} {
			_, _ = g.ports[i].Write([]byte(portName(i))) // the host may have gone
		}
		succeed(g, r)
	}})
	var out strings.Builder
	res, err := b.Run(t.Context(), plainSpec(), sandbox.Stdio{Stdout: &out, Stderr: &out})
	if err != nil || res.ExitCode != 3 || out.String() != portName(portStdout) {
		t.Errorf("got %+v, %v, output %q, want only that of the port %s", res, err, &out, portName(portStdout))
	}
}

// TestRunsThatNothingEndedAreNotStopped: a guest cannot pretend that the timeout or the caller ended a run.
func TestRunsThatNothingEndedAreNotStopped(t *testing.T) {
	for timeout, want := range map[time.Duration]string{0: "nothing ended the run", time.Minute: ""} {
		b := fakeBackend(t, false, &fakeGuest{run: func(g *guest, _ *runRequest) {
			for _, i := range []int{portStdout, portStderr} {
				_ = g.ports[i].end() // the host may have gone
			}
			_ = g.ports[portControl].sendMessage(answer{Result: &sandbox.Result{Stopped: true}})
		}})
		s := plainSpec()
		s.Timeout = timeout
		res, err := b.Run(t.Context(), s, sandbox.Stdio{})
		if (err == nil) != (want == "") || err != nil && (res != nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("timeout %v: got %+v, %v, want %q", timeout, res, err, want)
		}
	}
}

// TestPatienceDoesNotOverflow: a run with the longest timeout is not late at once.
func TestPatienceDoesNotOverflow(t *testing.T) {
	for timeout, want := range map[time.Duration]time.Duration{0: 0, time.Minute: time.Minute + 3*time.Second, math.MaxInt64: 0} {
		r := &run{b: &backend{times: times{late: time.Second}}, spec: &sandbox.Spec{Timeout: timeout, Grace: 2 * time.Second}}
		if got := r.patience(); got != want {
			t.Errorf("timeout %v: got %v, want %v", timeout, got, want)
		}
	}
}

// TestUnkillableMachinesKeepNobodyWaiting: if QEMU does not end, its ports are closed, and its cell is lost.
func TestUnkillableMachinesKeepNobodyWaiting(t *testing.T) {
	ended := exec.CommandContext(t.Context(), "true")
	must.Succeed(t, ended.Run())
	m := &machine{cell: &cell{}, end: time.Millisecond, files: newFileServer(), ended: make(chan struct{}), process: ended.Process}
	theirs, err := m.connect()
	must.Succeed(t, err)
	for _, f := range theirs {
		t.Cleanup(func() { f.Close() })
	}
	read := make(chan error, 1)
	go func() {
		_, err := m.ports[portControl].receive(1)
		read <- err
	}()
	if err := m.kill(); err == nil || !strings.Contains(err.Error(), "did not end") || !m.cell.lost {
		t.Errorf("got %v, lost %t, want an error and a lost cell", err, m.cell.lost)
	}
	if err := <-read; err == nil {
		t.Error("the port was read")
	}
}

// TestWorkspacesFitIntoMachines: a guest cannot return more than its machine could hold.
func TestWorkspacesFitIntoMachines(t *testing.T) {
	b := fakeBackend(t, false, &fakeGuest{run: succeed})
	b.memory = 1 << 20
	for _, c := range []struct{ bytes, files, wantBytes, wantFiles int64 }{
		{sandbox.Unlimited, sandbox.Unlimited, 1 << 20, 1 << 10}, {1 << 30, 1 << 30, 1 << 20, 1 << 10}, {1 << 16, 100, 1 << 16, 100},
	} {
		w, err := b.Workspace(t.Context(), c.bytes, c.files)
		must.Succeed(t, err)
		var st unix.Statfs_t
		must.Succeed(t, unix.Statfs(w.Name(), &st))
		if got := int64(st.Blocks) * st.Bsize; got < c.wantBytes || got > c.wantBytes+1<<16 || int64(st.Files) > c.wantFiles+64 {
			t.Errorf("%d bytes, %d files: got %d and %d, want about %d and %d", c.bytes, c.files, got, st.Files, c.wantBytes, c.wantFiles)
		}
		if own := b.workspace(w.Name()); own.bytes != c.wantBytes || own.files != c.wantFiles {
			t.Errorf("%d bytes, %d files: the guest's workspace has %d and %d, want %d and %d", c.bytes, c.files, own.bytes, own.files, c.wantBytes, c.wantFiles)
		}
		must.Succeed(t, w.Close())
	}
}

// TestFeaturesAreListed: a backend claims those features of its guest that it passes on, and no others.
func TestFeaturesAreListed(t *testing.T) {
	inside := &sandbox.Features{
		Audits:     []sandbox.Audit{sandbox.AuditOff, sandbox.AuditViolations, sandbox.AuditFull, "new"},
		Limits:     append(slices.Clone(sandbox.AllLimits), "new"),
		Conditions: append(slices.Clone(sandbox.AllConditions), "new"),
	}
	v := reflect.ValueOf(inside).Elem()
	for _, field := range v.Fields() {
		if field.Kind() == reflect.Bool {
			field.SetBool(true)
		}
	}
	groups, err := cgroup.Open()
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, groups.Close()) })
	got := (&backend{groups: groups}).describe(inside)
	for field, value := range reflect.ValueOf(got).Elem().Fields() {
		if value.Kind() == reflect.Bool && value.Bool() != slices.Contains([]string{"ListenControl", "Kill", "Lower"}, field.Name) {
			t.Errorf("%s: got %t", field.Name, value.Bool())
		}
	}
	if !slices.Equal(got.Audits, []sandbox.Audit{sandbox.AuditViolations, sandbox.AuditOff}) || !slices.Equal(got.Limits, sandbox.AllLimits) ||
		!slices.Equal(got.Conditions, sandbox.AllConditions) {
		t.Errorf("got audits %q, limits %q, conditions %q", got.Audits, got.Limits, got.Conditions)
	}
}
