// SPDX-License-Identifier: Apache-2.0

//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package audit_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/cas/durable"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/ramdir"
	"github.com/cloister-build/cloister/worker/audit"
)

// roles are what the test binary does as a child process, by the value of roleVar.
var roles = map[string]func(dir string) error{"append": appendUntilKilled, "hold": hold, "fill": fill, "full": full, "lose": lose, "die": die}

const roleVar = "CLOISTER_AUDIT_TEST_ROLE"

func TestMain(m *testing.M) {
	role, ok := roles[os.Getenv(roleVar)]
	if !ok {
		os.Exit(ramdir.Main(m))
	}
	if err := role(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// child returns the command for a role. It is killed at the end of the test.
func child(t *testing.T, role, dir string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), must.Get(os.Executable())(t), dir)
	cmd.Env = append(os.Environ(), roleVar+"="+role)
	cmd.Stderr = os.Stderr
	return cmd
}

// appendUntilKilled appends entries and prints the worker of each acknowledged one.
func appendUntilKilled(dir string) error {
	l, err := audit.Open(audit.Config{Dir: dir})
	if err != nil {
		return err
	}
	l.SetSegmentBytes(100_000)
	for i := range 20_000 { // bounded, in case nobody kills it
		e := entry(i)
		e.Worker = fmt.Sprintf("%d-%d", os.Getpid(), i)
		if i%3 == 0 {
			e.Target = strings.Repeat("x", 4000)
		}
		if err := l.Append(e); err != nil {
			return err
		}
		if _, err := fmt.Println(e.Worker); err != nil {
			return err
		}
	}
	return nil
}

func TestKilledWriterKeepsAcknowledgedEntries(t *testing.T) {
	dir, head := t.TempDir(), ""
	var acknowledged []string
	for round := range 8 {
		cmd := child(t, "append", dir)
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		must.Succeed(t, err)
		in := bufio.NewScanner(out)
		for n := 0; in.Scan(); n++ {
			acknowledged = append(acknowledged, in.Text())
			if n == 20+37*round {
				must.Succeed(t, cmd.Process.Kill())
			}
		}
		var died *exec.ExitError
		if err := cmd.Wait(); !errors.As(err, &died) || died.ExitCode() != -1 {
			t.Fatalf("the writer was not killed: %v", err)
		}
		verify(t, dir, head) // before the next writer repairs it
		must.Succeed(t, open(t, dir).Close())
		report := verify(t, dir, head)
		expect.Equal(t, report.Unfinished, 0, "round %d", round)
		head = report.Head
	}
	there := map[string]bool{}
	for _, r := range read(t, dir) {
		there[r.Worker] = true
	}
	for _, w := range acknowledged {
		expect.That(t, there[w], "the acknowledged entry %s is missing", w)
	}
	must.Be(t, len(acknowledged) >= 8*20, "got only %d acknowledged entries", len(acknowledged))
}

// TestUnfinishedLineIsRemoved cuts the last line at many places, since a kill rarely interrupts a write.
func TestUnfinishedLineIsRemoved(t *testing.T) {
	dir, _ := filled(t)
	head := read(t, dir)[10].Hash // the last whole line
	path := segments(t, dir)[2]
	whole := must.Get(os.ReadFile(path))(t)
	line := len(read(t, dir)[11].JSON()) + 1
	for cut := 1; cut < line; cut += 1 + cut/3 {
		must.Succeed(t, os.WriteFile(path, whole[:len(whole)-cut], 0o600))
		before := verify(t, dir, head)
		expect.That(t, before.Entries == 11 && before.Unfinished == int64(line-cut),
			"cut by %d: got %+v, want 11 entries and %d bytes", cut, *before, line-cut)
		l := open(t, dir)
		appendAll(t, l, entry(12))
		must.Succeed(t, l.Close())
		if r := verify(t, dir, head); r.Entries != 13 || r.Unfinished != 0 {
			t.Errorf("cut by %d: got %+v, want 13 entries", cut, *r)
		}
		rs := read(t, dir)
		if want := fmt.Sprintf("unfinished line of %d bytes", line-cut); !strings.Contains(rs[11].Note, want) || rs[11].Time.IsZero() {
			t.Errorf("cut by %d: note %q, want %q", cut, rs[11].Note, want)
		}
		if lines := rs[11].Lines("note"); len(lines) != 1 {
			t.Errorf("cut by %d: shown as %q", cut, lines)
		}
		for _, later := range segments(t, dir)[3:] {
			must.Succeed(t, os.Remove(later))
		}
	}
}

// hold keeps the log open until its stdin ends.
func hold(dir string) error {
	l, err := audit.Open(audit.Config{Dir: dir})
	if err != nil {
		return err
	}
	fmt.Println("held")
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return err
	}
	return l.Close()
}

func TestSecondWriterIsRefused(t *testing.T) {
	dir := t.TempDir()
	cmd := child(t, "hold", dir)
	stdin := must.Get(cmd.StdinPipe())(t)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	must.Succeed(t, err)
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("%q, %v", line, err)
	}
	want := fmt.Sprintf("is in use by process %d", cmd.Process.Pid)
	for range 2 { // a refused attempt keeps the holder's process ID
		expect.Message(t, expect.Err(audit.Open(audit.Config{Dir: dir})), want)
	}
	expect.Error(t, expect.Err(audit.Verify(dir, "")), nil, "Verify during deletions")
	must.Succeed(t, errors.Join(stdin.Close(), cmd.Wait()))
	open(t, dir)
}

// fillDisk limits the files of this process to a size, as a full disk does, until free is called.
func fillDisk(size uint64) (free func() error, err error) {
	signal.Ignore(syscall.SIGXFSZ)
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &old); err != nil {
		return nil, err
	}
	few := old
	few.Cur = size
	return func() error { return syscall.Setrlimit(syscall.RLIMIT_FSIZE, &old) }, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &few)
}

// fill appends to a log on a disk that becomes full in the middle of a line and is freed later.
func fill(dir string) error {
	l, err := audit.Open(audit.Config{Dir: dir})
	if err != nil {
		return err
	}
	defer l.Close()
	free, err := fillDisk(3000)
	if err != nil {
		return err
	}
	n := 0
	for ; n < 100; n++ {
		if err = l.Append(entry(n)); err != nil {
			break
		}
	}
	if n == 0 || !errors.Is(err, syscall.EFBIG) {
		return fmt.Errorf("got %v after %d entries, want EFBIG after some", err, n)
	}
	if err := l.Append(entry(n)); !errors.Is(err, syscall.EFBIG) {
		return fmt.Errorf("got %v, want EFBIG again", err)
	}
	if err := free(); err != nil {
		return err
	}
	for range 2 {
		if err := l.Append(entry(n)); err != nil {
			return err
		}
	}
	if lost := l.Lost(); lost != 2 {
		return fmt.Errorf("Lost = %d, want 2", lost)
	}
	fmt.Println(n + 2)
	return nil
}

func TestFullDiskLeavesNoPartialLine(t *testing.T) {
	dir := t.TempDir()
	out := must.Get(child(t, "fill", dir).Output())(t)
	report := verify(t, dir, "")
	expect.That(t, fmt.Sprintln(report.Entries) == string(out) && report.Unfinished == 0,
		"got %+v, want %s entries", *report, out)
	rs := read(t, dir)
	for i, r := range rs {
		want := ""
		if i == len(rs)-2 { // the first one after the disk was freed
			want = "2 entries before this one could not be written"
		}
		expect.Equal(t, r.Note, want, "entry %d of %d: note", i+1, len(rs))
	}
}

// full appends to a log at its limit on a full disk, where the announcement of a deletion cannot be written.
func full(dir string) error {
	l, err := audit.Open(audit.Config{Dir: dir, MaxBytes: bound})
	if err != nil {
		return err
	}
	defer l.Close()
	before, err := filepath.Glob(filepath.Join(dir, "*.jsonl"))
	if err != nil {
		return err
	}
	for n := range 20 { // more than a segment takes
		free, err := fillDisk(0)
		if err != nil {
			return err
		}
		if err := l.Append(entry(n)); !errors.Is(err, syscall.EFBIG) {
			return fmt.Errorf("got %v, want EFBIG", err)
		}
		for _, path := range before {
			if _, err := os.Stat(path); err != nil {
				return fmt.Errorf("deleted without an announcement: %w", err)
			}
		}
		if err := free(); err != nil {
			return err
		}
		if err := l.Append(entry(n)); err != nil {
			return err
		}
		if before, err = filepath.Glob(filepath.Join(dir, "*.jsonl")); err != nil {
			return err
		}
	}
	return err
}

func TestNothingIsDeletedUnannounced(t *testing.T) {
	dir := bounded(t, 100)
	if out, err := child(t, "full", dir).Output(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if r := verify(t, dir, ""); !r.Announced() || r.First == 1 {
		t.Errorf("got %+v, want an announced deletion", *r)
	}
}

// lose fills the disk after a deletion was announced and before the next entry is written.
func lose(dir string) error {
	free := func() error { return nil }
	var failed error
	c := audit.Config{Dir: dir, MaxBytes: bound}
	c.SetStep(func(step string) {
		if step == "segment deleted" {
			free, failed = fillDisk(0)
		}
	})
	l, err := audit.Open(c)
	if err != nil {
		return err
	}
	defer l.Close()
	n := 0
	for ; n < 20 && err == nil; n++ { // more than a segment takes
		err = l.Append(entry(n))
	}
	if !errors.Is(err, syscall.EFBIG) {
		return fmt.Errorf("got %v after %d entries, want EFBIG", err, n)
	}
	if err := errors.Join(failed, free()); err != nil {
		return err
	}
	return l.Append(entry(n))
}

// TestLostEntryAfterDrop checks that the entry of a deletion does not reset the number of lost entries.
func TestLostEntryAfterDrop(t *testing.T) {
	dir := bounded(t, 100)
	if out, err := child(t, "lose", dir).Output(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	rs := read(t, dir)
	if said, last := rs[len(rs)-2], rs[len(rs)-1]; said.Dropped == nil || last.Note != "1 entries before this one could not be written" {
		t.Errorf("got the last notes %q and %q, want a lost entry", said.Note, last.Note)
	}
}

// dieAt is the variable with the step of a rotation at which the writer kills itself, and its number: "STEP N".
const dieAt = "CLOISTER_AUDIT_TEST_DIE"

// die appends entries to a log at its limit, and kills itself between two steps of a rotation.
func die(dir string) error {
	var step string
	var left int
	if _, err := fmt.Sscanf(os.Getenv(dieAt), "%q %d", &step, &left); err != nil {
		return err
	}
	c := audit.Config{Dir: dir, MaxBytes: bound}
	c.SetStep(func(name string) {
		if name != step {
			return
		}
		if left--; left == 0 {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	})
	l, err := audit.Open(c)
	if err != nil {
		return err
	}
	for i := range 1000 { // bounded, in case it survives
		e := entry(i)
		e.Worker = fmt.Sprintf("%d-%d", os.Getpid(), i)
		if err := l.Append(e); err != nil {
			return err
		}
		if _, err := fmt.Println(e.Worker); err != nil {
			return err
		}
	}
	return l.Close()
}

// TestWriterKilledDuringRotation checks that acknowledged entries are kept or their deletion was announced.
func TestWriterKilledDuringRotation(t *testing.T) {
	for _, step := range []string{"segment ended", "segment begun", "drop written", "segment deleted"} {
		t.Run(step, func(t *testing.T) {
			dir := bounded(t, 41)
			var acknowledged []string
			head := verify(t, dir, "").Head
			for round := range 5 {
				cmd := child(t, "die", dir)
				cmd.Env = append(cmd.Env, fmt.Sprintf("%s=%q %d", dieAt, step, 1+round))
				out, err := cmd.Output()
				var died *exec.ExitError
				must.Be(t, errors.As(err, &died) && died.ExitCode() == -1, "the writer was not killed: %v", err)
				acknowledged = append(acknowledged, strings.Fields(string(out))...)
				for range 2 { // before and after the next writer repairs it
					r := verify(t, dir, "")
					if !r.Announced() {
						t.Errorf("round %d: the log begins with entry %d without an announcement: %+v", round, r.First, r.Dropped)
					}
					must.Succeed(t, must.Get(audit.Open(audit.Config{Dir: dir, MaxBytes: bound}))(t).Close())
					if n := bytesOf(t, dir); n > bound {
						t.Errorf("round %d: got %d bytes, want at most %d", round, n, bound)
					}
				}
				expect.That(t, head != verify(t, dir, "").Head, "round %d: nothing was appended", round)
				head = verify(t, dir, "").Head
			}
			there := map[string]bool{}
			for _, r := range read(t, dir) {
				there[r.Worker] = true
			}
			must.Be(t, len(acknowledged) != 0 && there[acknowledged[len(acknowledged)-1]],
				"the last of %d acknowledged entries is missing", len(acknowledged))
			begun := false // only the oldest may be missing
			for _, w := range acknowledged {
				if begun = begun || there[w]; begun && !there[w] {
					t.Errorf("the acknowledged entry %s is missing, although an older one exists", w)
				}
			}
		})
	}
}

// TestSegmentsAreDeletedWhileTheyAreRead deletes two segments when the reader, which has listed all, is in the first.
func TestSegmentsAreDeletedWhileTheyAreRead(t *testing.T) {
	dir, head := filled(t)
	paths := segments(t, dir)
	var read []uint64
	must.Succeed(t, audit.Read(dir, func(r audit.Record) error {
		if read = append(read, r.Seq); len(read) == 1 {
			return errors.Join(os.Remove(paths[0]), os.Remove(paths[1]))
		}
		return nil
	}))
	expect.Slices(t, read, []uint64{1, 2, 3, 4, 9, 10, 11, 12}, "entries")
	report := verify(t, dir, head)
	expect.Equal(t, *report, audit.Report{Entries: 4, First: 9, Begins: entry(8).Time, Head: head})
}

// TestPipesAreRefused: opening a pipe in place of a file would wait for its other end.
func TestPipesAreRefused(t *testing.T) {
	for _, name := range []string{"lock", "first", "newest"} {
		dir, _ := filled(t)
		paths := segments(t, dir)
		path := map[string]string{"lock": filepath.Join(dir, "lock"), "first": paths[0], "newest": paths[len(paths)-1]}[name]
		must.Succeed(t, errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600)))
		if name != "first" { // Open reads only the newest two segments
			expect.Error(t, expect.Err(audit.Open(audit.Config{Dir: dir})), durable.ErrNotRegular, "Open with a pipe as %s", name)
		}
		if name == "lock" {
			continue // no reader opens it
		}
		expect.Error(t, expect.Err(audit.Verify(dir, "")), durable.ErrNotRegular, "Verify with a pipe as the %s segment", name)
		expect.Error(t, expect.Err(audit.Files(dir, entry(0).Time)), durable.ErrNotRegular, "Files with a pipe as the %s segment", name)
	}
}
