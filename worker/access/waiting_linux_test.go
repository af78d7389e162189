// SPDX-License-Identifier: Apache-2.0

package access_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/syncbuf"
	"github.com/cloister-build/cloister/worker/access"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestPipeInPlaceOfTheFile checks that a pipe, which nobody writes, is a mistake, and that a later file is read.
func TestPipeInPlaceOfTheFile(t *testing.T) {
	name := filepath.Join(t.TempDir(), "auth.yaml")
	write(t, name, []byte(ofToken("old", "read")))
	var log syncbuf.Buffer
	live, err := access.NewLive(name, func(*access.Rules) error { return nil }, slog.New(slog.NewTextHandler(&log, nil)))
	must.Succeed(t, err)
	defer live.Close()
	conn := serve(t, live, nil).dial(nil, "Bearer old")
	must.Succeed(t, errors.Join(os.Remove(name), syscall.Mkfifo(name, 0o600)))
	live.Look()
	expect.Error(t, calls["BatchReadBlobs"](t.Context(), conn, ""), nil, "with a pipe")
	if text := log.String(); strings.Count(text, "level=WARN") != 1 || !strings.Contains(text, "not a regular file") {
		t.Errorf("got the log %s, want one warning", text)
	}
	must.Succeed(t, os.Remove(name))
	write(t, name, []byte(ofToken("new", "read")))
	live.Look()
	expect.Code(t, calls["BatchReadBlobs"](t.Context(), conn, ""), codes.Unauthenticated, "with a file again")
}

// TestFileThatDoesNotAnswer checks that a read without an end, as of a lost file server, delays nothing but is logged
// once, and that a revocation that can be read later comes into force.
func TestFileThatDoesNotAnswer(t *testing.T) {
	name := filepath.Join(t.TempDir(), "auth.yaml")
	write(t, name, []byte(ofToken("old", "read")))
	synctest.Test(t, func(t *testing.T) {
		var log syncbuf.Buffer
		hung, repaired := make(chan struct{}), make(chan struct{})
		var reads atomic.Int32
		live, err := access.NewLiveReading(name, slog.New(slog.NewTextHandler(&log, nil)), func(file string) (*access.Rules, error) {
			if reads.Add(1) == 1 {
				return access.ReadFile(file)
			}
			select {
			case <-repaired:
				return access.ReadFile(file)
			default:
			}
			<-hung
			return nil, errors.New("stale file handle")
		})
		must.Succeed(t, err)
		defer live.Close()
		old := live.Rules()
		write(t, name, nil)
		time.Sleep(10 * time.Minute)
		expect.That(t, live.Rules() == old, "the rules changed without a read")
		if text := log.String(); strings.Count(text, "level=WARN") != 1 || !strings.Contains(text, "does not answer within 5s") {
			t.Errorf("got the log %s, want one warning", text)
		}
		if n := reads.Load(); n > 30 {
			t.Errorf("%d reads were begun within ten minutes and hang", n-1)
		}
		write(t, name, []byte("version: 1\ncallers: []\n"))
		close(repaired)
		time.Sleep(2 * time.Minute)
		fresh := live.Rules()
		expect.That(t, fresh != old && fresh.String() == "0 callers",
			"got the rules of %v, want those of the changed file", fresh)
		close(hung)
		time.Sleep(time.Minute)
		expect.That(t, live.Rules().String() == "0 callers", "a read that was given up replaced the rules")
	})
}

// TestFileThatDoesNotAnswerAtStart checks that the start fails instead of waiting.
func TestFileThatDoesNotAnswerAtStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hung := make(chan struct{})
		defer close(hung)
		_, err := access.NewLiveReading("auth.yaml", slog.New(slog.DiscardHandler), func(string) (*access.Rules, error) {
			<-hung
			return nil, nil
		})
		expect.Message(t, err, "auth.yaml or a file that it names does not answer")
	})
}

// A patient queue of workers lets calls wait until their context ends, or answers ends, whatever ended the context.
type patient struct {
	remoteworkerpb.UnimplementedOperationQueueServer
	waiting chan struct{}
	answer  bool // although the call ended
}

func (p *patient) Synchronize(ctx context.Context, _ *remoteworkerpb.SynchronizeRequest) (*remoteworkerpb.SynchronizeResponse, error) {
	p.waiting <- struct{}{}
	<-ctx.Done()
	if p.answer {
		return &remoteworkerpb.SynchronizeResponse{}, nil
	}
	return nil, status.FromContextError(ctx.Err()).Err()
}

// TestRevokedWorkerStopsWaiting checks that a waiting worker is refused as soon as a changed file refuses it, that
// others continue to wait, and that an answer that comes too late is lost.
func TestRevokedWorkerStopsWaiting(t *testing.T) {
	entry := func(name, right string) string {
		return "  - {name: " + name + ", token_sha256: " + sum(name) + ", rights: [" + right + "]}\n"
	}
	for _, c := range []struct {
		name, changed string
		answer        bool
		want          codes.Code
	}{
		{"the right is removed", entry("w", "read"), false, codes.PermissionDenied},
		{"the right is narrowed", entry("w", "{work: main}"), false, codes.PermissionDenied},
		{"the caller is removed", "", false, codes.Unauthenticated},
		{"an answer comes too late", "", true, codes.Unauthenticated},
	} {
		t.Run(c.name, func(t *testing.T) {
			name := filepath.Join(t.TempDir(), "auth.yaml")
			write(t, name, []byte("version: 1\ncallers:\n"+entry("w", "work")+entry("other", "work")))
			live, err := access.NewLive(name, func(*access.Rules) error { return nil }, slog.New(slog.DiscardHandler))
			must.Succeed(t, err)
			defer live.Close()
			queue := &patient{waiting: make(chan struct{}), answer: c.answer}
			g := grpc.NewServer(live.WorkerOptions()...)
			remoteworkerpb.RegisterOperationQueueServer(g, queue)
			s := &server{T: t, address: grpctest.Listen(t, g)}
			ended := map[string]chan error{}
			ctx, cancel := context.WithCancel(t.Context())
			for _, who := range []string{"w", "other"} {
				end, conn := make(chan error, 1), s.dial(nil, "Bearer "+who)
				ended[who] = end
				go func() { end <- synchronize(ctx, conn, "main") }()
				<-queue.waiting
			}
			write(t, name, []byte("version: 1\ncallers:\n"+c.changed+entry("other", "{work: [main, main/*]}")))
			live.Look()
			expect.Code(t, <-ended["w"], c.want)
			select {
			case err := <-ended["other"]:
				t.Errorf("the other worker got %v", err)
			default:
			}
			cancel()
			<-ended["other"]
		})
	}
}
