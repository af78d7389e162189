// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/quota"
	"github.com/cloister-build/cloister/cmd/cloister/internal/server"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/cloister-build/cloister/worker/service"
	"google.golang.org/grpc"
)

// newHead returns a server that executes nothing itself and knows drained workers. The caller closes it.
func newHead(t *testing.T, drains queue.DrainState) (head *service.Server) {
	t.Helper()
	head, err := service.NewServer(t.Context(), service.Config{
		Worker: worker.Config{Name: "head", Instances: castest.Instances()}, Queue: queue.Config{Drains: drains}, Version: "0",
		Unready: func() []string {
			if why := server.AllDrained(head.Queue()); why != "" {
				return []string{why}
			}
			return nil
		},
	})
	must.Succeed(t, err)
	return head
}

// TestDrain: a drained worker takes no more actions and finishes those it has, --wait waits for that, and without a
// name every worker is drained and the server is not ready.
func TestDrain(t *testing.T) {
	head := newHead(t, queue.DrainState{})
	defer head.Close()
	work := head.Queue()
	at := "grpc://" + grpctest.Serve(t, func(s *grpc.Server) {
		expect.Error(t, head.Register(s), nil)
	})
	slots := map[string]*queue.Slot{}
	for _, name := range []string{"anvil", "bellows"} {
		s := must.Get(work.Join(queue.Offer{Worker: name, Slot: "1"}))(t)
		slots[name] = s
	}
	submit := func(text string) {
		t.Helper()
		must.Get(work.Submit(queue.Request{Task: worker.Task{Action: cas.SHA256.Sum([]byte(text)), Target: "//a:" + text}}))(t)
	}
	submit("first")
	run := must.Get(slots["anvil"].Take(t.Context()))(t)

	if out, code := runCLI(t, "drain", "anvil", "--reason", "a new kernel", "--cas", at); code != 0 || out != "drained anvil; 1 action running there\n" {
		t.Errorf("drain: exit %d, %q", code, out)
	}
	if out, code := runCLI(t, "drain", "anvil", "--wait", "--timeout", "600ms", "--cas", at); code != exit.Timeout || !strings.Contains(out, "1 action still running on anvil") {
		t.Errorf("drain --wait --timeout: exit %d, %q", code, out)
	}
	for _, want := range []string{"draining", "//a:first", "a new kernel"} {
		runCLI(t, "drain", "anvil", "--reason", "a new kernel", "--cas", at)
		if out, code := runCLI(t, "status", "--cas", at); code != 0 || !strings.Contains(out, want) {
			t.Errorf("status: exit %d, without %q:\n%s", code, want, out)
		}
	}
	waited := make(chan int, 1)
	go func() {
		_, code := runCLI(t, "drain", "anvil", "--wait", "--cas", at)
		waited <- code
	}()
	run.End(&worker.Outcome{}, nil)
	expect.Equal(t, <-waited, 0, "drain --wait: exit")

	submit("second")
	soon, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	expect.Error(t, expect.Err(slots["anvil"].Take(soon)), context.DeadlineExceeded, "a drained worker takes an action")
	if out, code := runCLI(t, "drain", "--all", "--cas", at); code != 0 || !strings.HasPrefix(out, "drained anvil, bellows;") {
		t.Errorf("drain of all: exit %d, %q", code, out)
	}
	if out, code := runCLI(t, "status", "--cas", at); code != exit.No || !strings.Contains(out, "every worker is drained") {
		t.Errorf("status of a drained server: exit %d\n%s", code, out)
	}
	if out, code := runCLI(t, "undrain", "--all", "--cas", at); code != 0 || !strings.HasPrefix(out, "undrained anvil, bellows") {
		t.Errorf("undrain: exit %d, %q", code, out)
	}
	if second, err := slots["anvil"].Take(t.Context()); err != nil {
		t.Errorf("an undrained worker takes nothing: %v", err)
	} else {
		second.End(&worker.Outcome{}, nil)
	}

	if out, code := runCLI(t, "drain", "tongs", "--cas", at); code != exit.Absent || !strings.Contains(out, "anvil") {
		t.Errorf("drain of nobody: exit %d, %q", code, out)
	}
	if out, code := runCLI(t, "drain", "anvil", "--reason", "a\nb", "--cas", at); code != exit.No || !strings.Contains(out, "one line") {
		t.Errorf("a reason of two lines: exit %d, %q", code, out)
	}
	if out, code := runCLI(t, "status", "--cas", "grpc://127.0.0.1:1"); code != exit.Unreachable {
		t.Errorf("nobody there: exit %d, %q", code, out)
	}
}

// TestDrainWaitsWhileQueriesAreRefused: drain --wait continues although the server refuses a query because of others.
func TestDrainWaitsWhileQueriesAreRefused(t *testing.T) {
	head := newHead(t, queue.DrainState{})
	defer head.Close()
	must.Get(head.Queue().Join(queue.Offer{Worker: "anvil", Slot: "1"}))(t)
	var refused atomic.Int32
	limit := func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		if info.FullMethod == cloisterpb.Fleet_Status_FullMethodName && refused.Add(1) <= 2 {
			return nil, quota.Exhausted("too many concurrent queries")
		}
		return handle(ctx, req)
	}
	at := "grpc://" + grpctest.Serve(t, func(s *grpc.Server) {
		must.Succeed(t, head.Register(s))
	}, grpc.UnaryInterceptor(limit))
	out, code := runCLI(t, "drain", "anvil", "--wait", "--cas", at)
	expect.Equal(t, fmt.Sprint(code, " ", out), "0 drained anvil; 0 actions running there\nidle    anvil\n", "drain --wait")
}

// TestDrainWaitsOverARestart: a server that is away is waited for, and one that is back knows who is drained; a worker
// is idle there once it was heard of each of its slots and none executes anything, also nothing of before.
func TestDrainWaitsOverARestart(t *testing.T) {
	// While the server is stopped, a connection of another program may take its port on 127.0.0.1.
	listener := must.Get(net.Listen("tcp", "127.35.0.1:0"))(t)
	at := listener.Addr().String()
	serve := func(listener net.Listener, drains queue.DrainState) (*service.Server, *grpc.Server) {
		head, s := newHead(t, drains), grpc.NewServer()
		expect.Error(t, head.Register(s), nil)
		go s.Serve(listener)
		return head, s
	}
	head, server := serve(listener, queue.DrainState{})
	work := head.Queue()
	slot := must.Get(work.Join(queue.Offer{Worker: "anvil", Slot: "1"}))(t)
	must.Get(work.Join(queue.Offer{Worker: "anvil", Slot: "2"}))(t)
	must.Get(work.Submit(queue.Request{Task: worker.Task{Action: cas.SHA256.Sum(nil)}}))(t)
	must.Get(slot.Take(t.Context()))(t)
	waited := make(chan string, 1)
	go func() {
		out, code := runCLI(t, "drain", "anvil", "--wait", "--cas", "grpc://"+at)
		waited <- fmt.Sprint(code, " ", out)
	}()
	for work.DrainState().Workers == nil {
		time.Sleep(10 * time.Millisecond)
	}
	still := func(when string) {
		t.Helper()
		select {
		case got := <-waited:
			t.Fatalf("%s: %s", when, got)
		case <-time.After(1200 * time.Millisecond): // it asks twice a second
		}
	}
	still("while it executes")
	server.Stop()
	drains := work.DrainState()
	head.Close()
	still("while the server is away")
	listener = must.Get(net.Listen("tcp", at))(t)
	head, server = serve(listener, drains)
	work = head.Queue()
	defer head.Close()
	defer server.Stop()
	still("before it was heard of")
	must.Get(work.Join(queue.Offer{Worker: "anvil", Slot: "2"}))(t)
	still("while it was heard of a slot alone that has nothing")
	slot = must.Get(work.Join(queue.Offer{Worker: "anvil", Slot: "1", Ending: true}))(t)
	still("while it ends what it had")
	slot.SetEnding(false)
	expect.Equal(t, <-waited, "0 drained anvil; 1 action running there\nidle    anvil\n", "at last")
}
