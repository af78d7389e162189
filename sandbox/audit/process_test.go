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
	"strings"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/sandbox/audit"
)

// roles are what the test binary does as a child of itself, by the value of roleVar, with a log.
var roles = map[string]func(dir string) error{"append": appendUntilKilled, "hold": hold, "fill": fill}

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
	l, err := audit.Open(dir)
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
	l, err := audit.Open(dir)
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
		if _, err := audit.Open(dir); err == nil || !strings.Contains(err.Error(), want) {
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

// fill appends to a log on a disk that becomes full in the middle of a line and then has room again.
func fill(dir string) error {
	l, err := audit.Open(dir)
	if err != nil {
		return err
	}
	defer l.Close()
	signal.Ignore(syscall.SIGXFSZ)
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &old); err != nil {
		return err
	}
	small := old
	small.Cur = 3000
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &small); err != nil {
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
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &old); err != nil {
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
	if want := (audit.Report{Entries: 4, First: 9, Head: head}); *report != want {
		t.Errorf("got %+v, want %+v", *report, want)
	}
}
