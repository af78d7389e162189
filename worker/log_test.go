// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"testing/synctest"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// readAll reads l while it grows.
func readAll(ctx context.Context, l *Log) (string, error) {
	var b strings.Builder
	for p := make([]byte, 3); ; {
		n, err := l.ReadAt(ctx, p, int64(b.Len()))
		b.Write(p[:n])
		if err != nil {
			return b.String(), err
		}
	}
}

func TestLogIsReadWhileItGrows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Log
		var got [3]string
		for i := range got {
			go func() { got[i], _ = readAll(t.Context(), &l) }()
		}
		p := make([]byte, 10)
		beyond := make(chan error, 1)
		go func() {
			_, err := l.ReadAt(t.Context(), p, 9)
			beyond <- err
		}()
		at := make(chan byte, 1)
		go func() {
			one := make([]byte, 1)
			l.ReadAt(t.Context(), one, 4)
			at <- one[0]
		}()
		for _, text := range []string{"ab", "", "cdefgh"} {
			synctest.Wait()
			if n, err := l.Write([]byte(text)); n != len(text) || err != nil {
				t.Errorf("Write(%q) = %d, %v", text, n, err)
			}
		}
		synctest.Wait()
		select {
		case c := <-at:
			expect.Equal(t, c, 'e', "at 4")
		default:
			t.Error("a waiting reader was not woken")
		}
		l.Close(nil)
		l.Close(errors.New("too late"))
		synctest.Wait()
		for _, text := range got {
			expect.Equal(t, text, "abcdefgh")
		}
		expect.Error(t, <-beyond, cas.ErrRange, "beyond the end")
		if n, err := l.ReadAt(t.Context(), p, 8); n != 0 || err != io.EOF {
			t.Errorf("at the end: got %d, %v, want EOF", n, err)
		}
		if _, err := l.Write([]byte("x")); err != io.ErrClosedPipe {
			t.Errorf("Write after Close: got %v, want ErrClosedPipe", err)
		}
	})
}

func TestIncompleteLogReturnsReason(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Log
		why := errors.New("it broke off")
		ctx, cancel := context.WithCancel(t.Context())
		ends := make(chan error, 2)
		go func() { _, err := readAll(ctx, &l); ends <- err }()
		synctest.Wait()
		cancel()
		if err := <-ends; err != context.Canceled {
			t.Errorf("cancelled reader: got %v", err)
		}
		go func() { _, err := readAll(t.Context(), &l); ends <- err }()
		synctest.Wait()
		l.Close(why)
		if err := <-ends; err != why {
			t.Errorf("got %v, want %v", err, why)
		}
	})
}

// The log of a running action equals the blob of its result, even if it is truncated.
func TestRule127_FollowedLogEqualsBlob(t *testing.T) {
	logs := &Logs{}
	followed := make(chan string)
	b := newBench(t, func(_ context.Context, _ *sandbox.Spec, std sandbox.Stdio, _ *os.Root) *sandbox.Result {
		go func() {
			text, err := readAll(t.Context(), &logs.Stdout)
			if err != io.EOF {
				t.Error(err)
			}
			followed <- text
		}()
		for range 10 {
			std.Stdout.Write([]byte("0123456789"))
		}
		std.Stderr.Write([]byte("x"))
		return &sandbox.Result{}
	})
	b.cfg.LogBytes = 25
	var text string
	out := must.Get(b.Execute(t.Context(), &Task{Action: b.action(nil), Logs: logs}, func(s Stage) {
		if s == StageCollect {
			text = <-followed
		}
	}))(t)
	for _, c := range []struct {
		text   string
		digest *repb.Digest
	}{{text, out.Result.StdoutDigest}, {string(logs.Stderr.bytes()), out.Result.StderrDigest}} {
		if got := cas.SHA256.Sum([]byte(c.text)); got.Hash() != c.digest.Hash {
			t.Errorf("log %q: got digest %s in the result, want %s", c.text, c.digest.Hash, got)
		}
	}
	expect.Equal(t, text, "0123456789012345678901234"+TruncationNotice, "log")
}

func TestLogOfCancelledRunStaysOpen(t *testing.T) {
	logs := &Logs{}
	ctx, cancel := context.WithCancel(t.Context())
	b := newBench(t, func(_ context.Context, _ *sandbox.Spec, std sandbox.Stdio, _ *os.Root) *sandbox.Result {
		std.Stdout.Write([]byte("half"))
		cancel()
		return &sandbox.Result{}
	})
	if out, err := b.Execute(ctx, &Task{Action: b.action(nil), Logs: logs}, func(Stage) {}); err == nil {
		t.Fatalf("got %v, want an error", out)
	}
	why := errors.New("cancelled")
	logs.Stdout.Close(why)
	if text, err := readAll(t.Context(), &logs.Stdout); text != "half" || err != why {
		t.Errorf("got %q, %v", text, err)
	}
}
