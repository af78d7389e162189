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

	"github.com/cloister-build/cloister/worker/audit"
)

// roles are what the test binary does as a child of itself, by the value of roleVar, with a log.
var roles = map[string]func(dir string) error{"append": appendUntilKilled, "hold": hold, "fill": fill, "full": full, "lose": lose, "die": die}

const roleVar = "CLOISTER_AUDIT_TEST_ROLE"

func TestMain(m *testing.M) {
	role, ok := roles[os.Getenv(roleVar)]
	if !ok {
		os.Exit(m.Run())
	}
	if err := role(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// child returns the command that runs a role in another process. It ends with the test.
func child(t *testing.T, role, dir string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, dir)
	cmd.Env = append(os.Environ(), roleVar+"="+role)
	cmd.Stderr = os.Stderr
	return cmd
}

// appendUntilKilled appends entries and writes a line to stdout for each that it was told is there.
func appendUntilKilled(dir string) error {
	l, err := audit.Open(audit.Config{Dir: dir})
	if err != nil {
		return err
	}
	l.SetSegmentBytes(100_000)
	for i := range 20_000 { // an end, should nobody kill it
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

func TestKilledWriterKeepsWhatItAcknowledged(t *testing.T) {
	dir, head := t.TempDir(), ""
	var acknowledged []string
	for round := range 8 {
		cmd := child(t, "append", dir)
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		in := bufio.NewScanner(out)
		for n := 0; in.Scan(); n++ {
			acknowledged = append(acknowledged, in.Text())
			if n == 20+37*round {
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
		}
		var died *exec.ExitError
		if err := cmd.Wait(); !errors.As(err, &died) || died.ExitCode() != -1 {
			t.Fatalf("the writer ended by itself: %v", err)
		}
		verify(t, dir, head) // before anybody has repaired it, too
		if err := open(t, dir).Close(); err != nil {
			t.Fatal(err)
		}
		report := verify(t, dir, head)
		if report.Unfinished != 0 {
			t.Errorf("round %d: %d bytes of an unfinished line", round, report.Unfinished)
		}
		head = report.Head
	}
	there := map[string]bool{}
	for _, r := range read(t, dir) {
		there[r.Worker] = true
	}
	for _, w := range acknowledged {
		if !there[w] {
			t.Errorf("entry %s was acknowledged, and is not there", w)
		}
	}
	if len(acknowledged) < 8*20 {
		t.Fatalf("only %d entries were acknowledged", len(acknowledged))
	}
}

// A kill seldom hits the middle of a write, so the line is cut at every place here.
func TestUnfinishedLineIsCutOffAndRecorded(t *testing.T) {
	dir, _ := filled(t)
	head := read(t, dir)[10].Hash // the last whole line
	path := segments(t, dir)[2]
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	line := len(read(t, dir)[11].JSON()) + 1
	for cut := 1; cut < line; cut += 1 + cut/3 {
		if err := os.WriteFile(path, whole[:len(whole)-cut], 0o600); err != nil {
			t.Fatal(err)
		}
		before := verify(t, dir, head)
		if before.Entries != 11 || before.Unfinished != int64(line-cut) {
			t.Errorf("cut by %d: got %+v, want 11 entries and %d bytes", cut, *before, line-cut)
		}
		l := open(t, dir)
		appendAll(t, l, entry(12))
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if r := verify(t, dir, head); r.Entries != 13 || r.Unfinished != 0 {
			t.Errorf("cut by %d: got %+v, want 13 entries", cut, *r)
		}
		rs := read(t, dir)
		if want := fmt.Sprintf("unfinished line of %d bytes was cut off", line-cut); !strings.Contains(rs[11].Note, want) || rs[11].Time.IsZero() {
			t.Errorf("cut by %d: note %q, want %q", cut, rs[11].Note, want)
		}
		if lines := rs[11].Lines("note"); len(lines) != 1 {
			t.Errorf("cut by %d: shown as %q", cut, lines)
		}
		for _, later := range segments(t, dir)[3:] {
			if err := os.Remove(later); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// hold keeps the log until its stdin ends.
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
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("%q, %v", line, err)
	}
	want := fmt.Sprintf("is written by process %d", cmd.Process.Pid)
	for range 2 { // being refused leaves what the holder said
		if _, err := audit.Open(audit.Config{Dir: dir}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	if _, err := audit.Verify(dir, ""); err != nil {
		t.Errorf("readers need no lock: %v", err)
	}
	if err := errors.Join(stdin.Close(), cmd.Wait()); err != nil {
		t.Error(err)
	}
	open(t, dir)
}

// crowd has no file of this process grow beyond so many bytes, as if the disk were full, until room is called.
func crowd(most uint64) (room func() error, err error) {
	signal.Ignore(syscall.SIGXFSZ)
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &old); err != nil {
		return nil, err
	}
	few := old
	few.Cur = most
	return func() error { return syscall.Setrlimit(syscall.RLIMIT_FSIZE, &old) }, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &few)
}

// fill appends to a log on a disk that becomes full in the middle of a line and then has room again.
func fill(dir string) error {
	l, err := audit.Open(audit.Config{Dir: dir})
	if err != nil {
		return err
	}
	defer l.Close()
	room, err := crowd(3000)
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
	if err := room(); err != nil {
		return err
	}
	for range 2 {
		if err := l.Append(entry(n)); err != nil {
			return err
		}
	}
	fmt.Println(n + 2)
	return nil
}

func TestFullDiskLeavesNoPartOfALine(t *testing.T) {
	dir := t.TempDir()
	out, err := child(t, "fill", dir).Output()
	if err != nil {
		t.Fatal(err)
	}
	report := verify(t, dir, "")
	if fmt.Sprintln(report.Entries) != string(out) || report.Unfinished != 0 {
		t.Errorf("got %+v, want %s entries", *report, out)
	}
	rs := read(t, dir)
	for i, r := range rs {
		want := ""
		if i == len(rs)-2 { // the first that had room again
			want = "2 entries before this one could not be written"
		}
		if r.Note != want {
			t.Errorf("entry %d of %d: note %q, want %q", i+1, len(rs), r.Note, want)
		}
	}
}

// full has no room for the entry that says what is deleted, in a log that has reached its bound.
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
	for n := 0; n < 20; n++ { // more than a segment takes
		room, err := crowd(0)
		if err != nil {
			return err
		}
		if err := l.Append(entry(n)); !errors.Is(err, syscall.EFBIG) {
			return fmt.Errorf("got %v, want EFBIG", err)
		}
		for _, path := range before {
			if _, err := os.Stat(path); err != nil {
				return fmt.Errorf("deleted without a word: %w", err)
			}
		}
		if err := room(); err != nil {
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

// TestNothingIsDeletedThatIsNotSaid: where the entry that says so cannot be written, the oldest stay.
func TestNothingIsDeletedThatIsNotSaid(t *testing.T) {
	dir := bounded(t, 100)
	if out, err := child(t, "full", dir).Output(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if r := verify(t, dir, ""); !r.Announced() || r.First == 1 {
		t.Errorf("got %+v, want a log of which the oldest entries were deleted, as it says", *r)
	}
}

// lose has room for the entry that says what is deleted, and none for the one that it makes room for.
func lose(dir string) error {
	room := func() error { return nil }
	var failed error
	c := audit.Config{Dir: dir, MaxBytes: bound}
	c.SetReached(func(step string) {
		if step == "segment deleted" {
			room, failed = crowd(0)
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
	if err := errors.Join(failed, room()); err != nil {
		return err
	}
	return l.Append(entry(n))
}

// TestLostBehindADrop: that an entry says what is deleted is no reason to forget the one that could not be written behind it.
func TestLostBehindADrop(t *testing.T) {
	dir := bounded(t, 100)
	if out, err := child(t, "lose", dir).Output(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	rs := read(t, dir)
	if said, last := rs[len(rs)-2], rs[len(rs)-1]; said.Dropped == nil || last.Note != "1 entries before this one could not be written" {
		t.Errorf("it ends with the notes %q and %q, want that an entry was lost", said.Note, last.Note)
	}
}

// dieAt is the variable that says at which step of a rotation, counted from the first that deletes something, the writer
// dies: "STEP N".
const dieAt = "CLOISTER_AUDIT_TEST_DIE"

// die appends entries to a log that is at its bound, and kills itself between two steps of a rotation.
func die(dir string) error {
	var step string
	var left int
	if _, err := fmt.Sscanf(os.Getenv(dieAt), "%q %d", &step, &left); err != nil {
		return err
	}
	c := audit.Config{Dir: dir, MaxBytes: bound}
	c.SetReached(func(name string) {
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
	for i := range 1000 { // an end, should it live
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

// TestKilledWhileItRotates: whenever the writer dies, what was acknowledged and is not there, the log says that it deleted.
func TestKilledWhileItRotates(t *testing.T) {
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
				if !errors.As(err, &died) || died.ExitCode() != -1 {
					t.Fatalf("the writer ended by itself: %v", err)
				}
				acknowledged = append(acknowledged, strings.Fields(string(out))...)
				for range 2 { // before anybody has repaired it, and after
					r := verify(t, dir, "")
					if !r.Announced() {
						t.Errorf("round %d: it begins with entry %d, and does not say why: %+v", round, r.First, r.Dropped)
					}
					l, err := audit.Open(audit.Config{Dir: dir, MaxBytes: bound})
					if err != nil {
						t.Fatal(err)
					}
					if err := l.Close(); err != nil {
						t.Fatal(err)
					}
					if n := bytesOf(t, dir); n > bound {
						t.Errorf("round %d: %d bytes, want at most %d", round, n, bound)
					}
				}
				if head == verify(t, dir, "").Head {
					t.Errorf("round %d: nothing was appended", round)
				}
				head = verify(t, dir, "").Head
			}
			there := map[string]bool{}
			for _, r := range read(t, dir) {
				there[r.Worker] = true
			}
			if len(acknowledged) == 0 || !there[acknowledged[len(acknowledged)-1]] {
				t.Fatalf("the last of %d acknowledged entries is not there", len(acknowledged))
			}
			begun := false // the oldest are deleted, and no others
			for _, w := range acknowledged {
				if begun = begun || there[w]; begun && !there[w] {
					t.Errorf("entry %s was acknowledged, and is not there, though an older one is", w)
				}
			}
		})
	}
}

// The first segment is a pipe here, so that it is known how far the reader has come.
func TestVerifyWhileTheOldestSegmentsAreDeleted(t *testing.T) {
	dir, head := filled(t)
	paths := segments(t, dir)
	first, err := os.ReadFile(paths[0])
	if err == nil {
		err = os.Remove(paths[0])
	}
	if err == nil {
		err = syscall.Mkfifo(paths[0], 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		pipe, err := os.OpenFile(paths[0], os.O_WRONLY, 0) // waits for the reader, who has listed all segments
		if err != nil {
			t.Error(err)
			return
		}
		_, err = pipe.Write(first)
		if err := errors.Join(err, os.Remove(paths[0]), os.Remove(paths[1]), pipe.Close()); err != nil {
			t.Error(err)
		}
	}()
	report := verify(t, dir, head)
	if want := (audit.Report{Entries: 4, First: 9, Begins: entry(8).Time, Head: head}); *report != want {
		t.Errorf("got %+v, want %+v", *report, want)
	}
}
