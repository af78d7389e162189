// SPDX-License-Identifier: Apache-2.0

package environments

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/cmd/cloister/internal/unixsocket"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
)

// TestNewSandboxKeepsItsDirectory: no sweep takes the directory of a new sandbox, and of several concurrent claims of
// one name, one succeeds.
func TestNewSandboxKeepsItsDirectory(t *testing.T) {
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	all := must.Get(Dir())(t)
	ctx, stop := context.WithCancel(t.Context())
	var sweeping, creating sync.WaitGroup
	for range 2 {
		sweeping.Go(func() {
			for ctx.Err() == nil {
				expect.Error(t, sweep(all), nil, "sweep")
			}
		})
	}
	for n := range 4 {
		creating.Go(func() {
			for range 50 {
				dir, held, err := claim("")
				if err != nil {
					t.Errorf("claim: %v", err)
					continue
				}
				expect.Error(t, expect.Err(os.Stat(filepath.Join(dir, "lock"))), nil, "a sweep took a new sandbox")
				expect.Error(t, discard(dir), nil, "discard")
				held.Close()
			}
		})
		creating.Go(func() {
			dir, held, err := claim("one")
			if err == nil {
				expect.Error(t, discard(dir), nil, "discard")
				held.Close()
				return
			}
			if e, ok := errors.AsType[*exit.Error](err); !ok || e.Code != exit.No || dir != "" || held != nil {
				t.Errorf("%d: got %q, %v; want a directory or the exit code %d", n, dir, err, exit.No)
			}
		})
	}
	creating.Wait()
	stop()
	sweeping.Wait()
	left := must.Get(os.ReadDir(filepath.Join(filepath.Dir(all), "moving")))(t)
	expect.That(t, len(left) == 0, "left in the directory of moves: %v", left)
}

// TestLifetimeBeforeTheStartIsExplained: a lifetime that ends before the agent is ready leads to advice about its flag.
func TestLifetimeBeforeTheStartIsExplained(t *testing.T) {
	for _, kernel := range []string{"", "another"} {
		s := supervisor{config: &Config{Lifetime: time.Second}}
		err := s.startAgent(t.Context(), &sandbox.Features{Kernel: kernel}, func(context.Context, sandbox.Stdio) (*worker.Outcome, error) {
			return &worker.Outcome{Status: worker.StatusTimedOut}, nil
		})
		expect.Message(t, err, "maximum lifetime of 1s; pass a longer --lifetime")
	}
}

// TestSweepNeedsNoNamespaces: a command cleans up after a killed supervisor even if the probe of namespaces fails, as
// it does in this test binary.
func TestSweepNeedsNoNamespaces(t *testing.T) {
	_, err := namespace.New(namespace.Config{}).Probe(t.Context())
	expect.That(t, err != nil, "the probe succeeds")
	all := t.TempDir()
	dir := filepath.Join(all, "sandboxes", "dev")
	must.Succeed(t, os.MkdirAll(dir, 0o700))
	must.Succeed(t, must.Get(localworker.Hold(dir, true))(t).Close())
	must.Succeed(t, write(dir, &State{}))
	expect.Error(t, sweep(filepath.Dir(dir)), nil, "sweep")
	expect.Error(t, expect.Err(os.Stat(dir)), os.ErrNotExist, "the directory after the sweep")
}

// TestSweepOfTemporaryDirectories: a sweep removes the temporary directory of a killed supervisor before the note that
// names it. It also removes that of an earlier version, which wrote no note.
func TestSweepOfTemporaryDirectories(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	all := filepath.Join(t.TempDir(), "sandboxes")
	// killed creates the files that a killed supervisor leaves behind, and returns its temporary directory in temp.
	killed := func(name, temp string) string {
		dir := filepath.Join(all, name)
		must.Succeed(t, os.MkdirAll(dir, 0o700))
		must.Succeed(t, must.Get(localworker.Hold(dir, true))(t).Close())
		must.Succeed(t, write(dir, &State{}))
		left, held, _, err := localworker.NewDir(temp)
		must.Succeed(t, errors.Join(err, held.Close()))
		return left
	}
	earlier := killed("earlier", os.TempDir())
	expect.Error(t, sweep(all), nil, "sweep")
	expect.Error(t, expect.Err(os.Stat(earlier)), os.ErrNotExist, "the directory of an earlier version")

	temp := t.TempDir()
	left := killed("dev", temp)
	note := filepath.Join(all, "dev", tempFile)
	must.Succeed(t, os.WriteFile(note, []byte(temp), 0o600))
	moving := filepath.Join(filepath.Dir(all), "moving")
	must.Succeed(t, os.RemoveAll(moving))
	must.Succeed(t, os.WriteFile(moving, nil, 0o600)) // ends the sweep early
	expect.That(t, sweep(all) != nil, "the sweep succeeded")
	expect.Error(t, expect.Err(os.Stat(note)), nil, "the note")
	expect.Error(t, expect.Err(os.Stat(left)), os.ErrNotExist, "the noted directory")

	must.Succeed(t, os.Remove(moving))
	file := filepath.Join(temp, "file")
	must.Succeed(t, os.WriteFile(file, nil, 0o600))
	must.Succeed(t, os.WriteFile(note, []byte(file), 0o600))
	expect.Error(t, sweep(all), syscall.ENOTDIR, "with a directory that cannot be swept")
	expect.Error(t, expect.Err(os.Stat(note)), nil, "the note after that")
	must.Succeed(t, os.Remove(file))
	expect.Error(t, sweep(all), nil, "the next sweep")
	expect.Error(t, expect.Err(os.Stat(note)), os.ErrNotExist, "the note after the next sweep")
}

// TestLeftoversDoNotBlockOthers: what cannot be removed of a killed sandbox affects no other one, except that ls reports
// it.
func TestLeftoversDoNotBlockOthers(t *testing.T) {
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	all, file, temp := must.Get(Dir())(t), filepath.Join(t.TempDir(), "file"), t.TempDir()
	must.Succeed(t, os.WriteFile(file, nil, 0o600))
	for name, noted := range map[string]string{"bad": file, "killed": temp, "ended": ""} {
		dir := filepath.Join(all, name)
		must.Succeed(t, os.Mkdir(dir, 0o700))
		must.Succeed(t, must.Get(localworker.Hold(dir, true))(t).Close())
		s := &State{Name: name}
		if noted == "" {
			s.Ended = time.Now()
		} else {
			must.Succeed(t, os.WriteFile(filepath.Join(dir, tempFile), []byte(noted), 0o600))
		}
		must.Succeed(t, write(dir, s))
	}
	list, err := List()
	expect.Error(t, err, syscall.ENOTDIR, "ls")
	var names []string
	for _, s := range list {
		names = append(names, s.Name)
		expect.That(t, !s.Running, "%s runs", s.Name)
	}
	expect.Slices(t, names, []string{"bad", "ended"}, "sandboxes, after a sweep of the others")
	_, held, err := claim("new")
	must.Succeed(t, err)
	held.Close()
	_, _, err = find("ended")
	expect.Error(t, err, nil, "a command on another sandbox")
	_, _, err = find("bad")
	expect.Error(t, err, syscall.ENOTDIR, "a command on the sandbox itself")
}

// TestSweepAfterARecordedEnd: a supervisor may be killed after it has recorded the end of its sandbox and before it has
// cleaned up. The sandbox keeps its directory, with its log.
func TestSweepAfterARecordedEnd(t *testing.T) {
	all := filepath.Join(t.TempDir(), "sandboxes")
	dir, temp := filepath.Join(all, "dev"), t.TempDir()
	must.Succeed(t, os.MkdirAll(dir, 0o700))
	must.Succeed(t, must.Get(localworker.Hold(dir, true))(t).Close())
	must.Succeed(t, write(dir, &State{Ended: time.Now()}))
	left, held, _, err := localworker.NewDir(temp)
	must.Succeed(t, errors.Join(err, held.Close()))
	expect.Error(t, sweep(all), nil, "sweep without a note")
	expect.Error(t, expect.Err(os.Stat(left)), nil, "a directory without a note")
	note := filepath.Join(dir, tempFile)
	must.Succeed(t, os.WriteFile(note, []byte(temp), 0o600))
	expect.Error(t, sweep(all), nil, "sweep with a note")
	expect.Error(t, expect.Err(os.Stat(left)), os.ErrNotExist, "the noted directory")
	expect.Error(t, expect.Err(os.Stat(note)), os.ErrNotExist, "the note")
	expect.Error(t, expect.Err(read(dir)), nil, "the state")
}

// TestRemoveAfterAKill: a supervisor may be killed while a client waits for the end of its sandbox. The client then
// removes the noted directory, too.
func TestRemoveAfterAKill(t *testing.T) {
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	dir, held, err := claim("dev")
	must.Succeed(t, err)
	temp := t.TempDir()
	left, other, _, err := localworker.NewDir(temp)
	must.Succeed(t, errors.Join(err, other.Close()))
	must.Succeed(t, os.WriteFile(filepath.Join(dir, tempFile), []byte(temp), 0o600))
	must.Succeed(t, write(dir, &State{PID: os.Getpid()}))
	l := must.Get(unixsocket.Listen(dir, socketFile))(t)
	go func() {
		if conn, err := l.Accept(); err == nil {
			l.Close()
			held.Close()
			conn.Close()
		}
	}()
	_, err = Remove(t.Context(), "dev")
	if e, ok := errors.AsType[*exit.Error](err); !ok || e.Code != exit.Absent {
		t.Errorf("got %v, want exit code %d, as for a killed sandbox", err, exit.Absent)
	}
	expect.Error(t, expect.Err(os.Stat(dir)), os.ErrNotExist, "the sandbox")
	expect.Error(t, expect.Err(os.Stat(left)), os.ErrNotExist, "the noted directory")
}

// TestKilledSupervisorIsAwaited: a supervisor that was killed keeps its lock for a moment, in which it does not live.
func TestKilledSupervisorIsAwaited(t *testing.T) {
	dir := t.TempDir()
	locked := must.Get(localworker.Hold(dir, true))(t)
	cmd := exec.CommandContext(t.Context(), "sleep", "1000")
	must.Succeed(t, cmd.Start())
	must.Succeed(t, write(dir, &State{PID: cmd.Process.Pid}))
	soon := func() time.Time { return time.Now().Add(time.Minute) }
	if held, err := hold(dir, soon()); err == nil || held != nil {
		t.Errorf("while the supervisor lives: got %v, %v, want an error", held, err)
	}
	must.Succeed(t, cmd.Process.Kill())
	if dying, ended := fate(cmd.Process.Pid); !dying || ended {
		t.Errorf("of a killed process: got %v, %v, want that it is dying", dying, ended)
	}
	got := make(chan error, 1)
	go func() {
		held, err := hold(dir, soon())
		got <- errors.Join(err, held.Close())
	}()
	must.Succeed(t, locked.Close())
	must.Succeed(t, <-got)
	_ = cmd.Wait() // reports the kill
	locked = must.Get(localworker.Hold(dir, false))(t)
	defer locked.Close()
	if held, err := hold(dir, soon()); err == nil || held != nil {
		t.Errorf("locked by another process: got %v, %v, want an error", held, err)
	}
}

// TestForeignStateDirectoryIsRefused: others could replace the sandboxes in it.
func TestForeignStateDirectoryIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(dir string) error
		want   string
	}{
		"writable": {func(dir string) error { return os.Chmod(dir, 0o770) }, "chmod 700"},
		"owner": {func(dir string) error {
			if os.Geteuid() != 0 {
				return errors.ErrUnsupported // only root can give a directory away
			}
			return os.Chown(dir, 12345, 12345)
		}, "belongs to user 12345"},
	} {
		for _, which := range []string{"cloister", "cloister/sandboxes"} {
			state := t.TempDir()
			t.Setenv("XDG_STATE_HOME", state)
			must.Get(Dir())(t)
			if c.change(filepath.Join(state, which)) != nil {
				continue
			}
			_, err := List()
			if e, ok := errors.AsType[*exit.Error](err); !ok || e.Code != exit.Environment || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s of %s: got %v, want exit code %d and %q", name, which, err, exit.Environment, c.want)
			}
		}
	}
}

// TestStoppedSupervisorDoesNotDelayStop: Stop waits for its answer only as long as for its lock.
func TestStoppedSupervisorDoesNotDelayStop(t *testing.T) {
	dir := t.TempDir()
	l := must.Get(unixsocket.Listen(dir, socketFile))(t)
	defer l.Close()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		if conn, err := l.Accept(); err == nil {
			defer conn.Close()
			cancel()
			<-t.Context().Done() // it never answers
		}
	}()
	requestEnd(ctx, dir)
}

// TestErrorsOfCopies: an error of this host has its exit code, and what a sandbox sent cannot control a terminal.
func TestErrorsOfCopies(t *testing.T) {
	_, absent := os.Open("/absent\x1b[31m")
	for _, c := range []struct {
		err  error
		code int
		text string
	}{
		{errors.New("invalid archive:\r\x1b[31m\nit is empty\n"), exit.No, `copy f: invalid archive:\r\x1b[31m` + "\nit is empty"},
		{absent, exit.Environment, `copy f: open /absent\x1b[31m: no such file or directory`},
	} {
		err := copyError("f", c.err)
		if e, ok := errors.AsType[*exit.Error](err); !ok || e.Code != c.code || err.Error() != c.text {
			t.Errorf("got %q with %+v, want %q with exit code %d", err, e, c.text, c.code)
		}
	}
}

// TestLogThatLacksLinesIsMarked: it must not look as if the sandbox had denied nothing.
func TestLogThatLacksLinesIsMarked(t *testing.T) {
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	all := must.Get(Dir())(t)
	for name, lose := range map[string]func(*eventLog){
		"unwritable": func(l *eventLog) { l.close() },
		"large":      func(l *eventLog) { l.size = maxLog },
	} {
		dir := filepath.Join(all, name)
		must.Succeed(t, os.Mkdir(dir, 0o700))
		must.Succeed(t, write(dir, &State{Ended: time.Now()}))
		l := must.Get(openLog(filepath.Join(dir, logFile)))(t)
		l.add("created")
		expect.Equal(t, len(must.Get(Logs(name))(t)), 1, name)
		lose(l)
		for range 2 {
			l.add("a denial")
		}
		l.close()
		lines := must.Get(Logs(name))(t)
		must.Be(t, len(lines) == 2, "%s: got %v, want two lines", name, lines)
		expect.Equal(t, lines[0].Text, "created", name)
		expect.Text(t, lines[1].Text, "is incomplete", name)
	}
}
