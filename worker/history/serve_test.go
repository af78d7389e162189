// SPDX-License-Identifier: Apache-2.0

package history

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas/castest"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// client returns a client of a server of l.
func client(t *testing.T, l *Log) cloisterpb.HistoryClient {
	t.Helper()
	server := grpc.NewServer()
	must.Succeed(t, Register(server, l, castest.Instances(), func(_ context.Context, instance string) bool { return instance != "secret" }))
	return cloisterpb.NewHistoryClient(grpctest.Connect(t, server))
}

// listed returns all entries that List sends.
func listed(t *testing.T, c cloisterpb.HistoryClient, req *cloisterpb.ListHistoryRequest) ([]*cloisterpb.HistoryEntry, error) {
	t.Helper()
	stream, err := c.List(t.Context(), req)
	if err != nil {
		return nil, err
	}
	var all []*cloisterpb.HistoryEntry
	for {
		page, err := stream.Recv()
		if err == io.EOF {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		all = append(all, page.Entries...)
	}
}

func TestListServesSearches(t *testing.T) {
	l := open(t, Config{Dir: t.TempDir()})
	c := client(t, l)
	for i := range 3 * pageSize {
		l.Add(Entry{Action: digest(i), How: Executed, Invocation: fmt.Sprint("i", i%2), Target: "//t", Mnemonic: "m", Exit: int32(i % 3), Ran: time.Second, Waited: time.Minute, Prepared: 2, Stored: 3, Instance: "main"})
	}
	l.Add(Entry{Action: digest(0), Instance: "other"})
	l.Add(Entry{Action: digest(0), Instance: "secret"})
	all, err := listed(t, c, &cloisterpb.ListHistoryRequest{InstanceName: "main"})
	must.Be(t, err == nil && len(all) == 3*pageSize, "%d entries, %v, want %d", len(all), err, 3*pageSize)
	e := all[0]
	if e.Number != 3*pageSize || e.Action != digest(3*pageSize-1) || e.How != "executed" || e.TargetId != "//t" || e.ActionMnemonic != "m" || e.InvocationId != "i1" ||
		e.ExitCode != 2 || e.Ran.AsDuration() != time.Second || e.Waited.AsDuration() != time.Minute || e.Prepared.Nanos != 2 || e.Stored.Nanos != 3 || e.Time == nil || e.InstanceName != "main" {
		t.Errorf("newest entry is %v, want number %d with every field", e, 3*pageSize)
	}
	for _, c2 := range []struct {
		req  *cloisterpb.ListHistoryRequest
		want int
	}{
		{&cloisterpb.ListHistoryRequest{InstanceName: "other"}, 1},
		{&cloisterpb.ListHistoryRequest{}, 0},
		{&cloisterpb.ListHistoryRequest{AllInstances: true}, 3*pageSize + 1},
		{&cloisterpb.ListHistoryRequest{AllInstances: true, Action: digest(0), Distinct: true}, 2},
		{&cloisterpb.ListHistoryRequest{InstanceName: "main", InvocationId: "i0"}, 3 * pageSize / 2},
		{&cloisterpb.ListHistoryRequest{InstanceName: "main", Failed: true}, 2 * pageSize},
		{&cloisterpb.ListHistoryRequest{InstanceName: "main", Limit: 7}, 7},
		{&cloisterpb.ListHistoryRequest{InstanceName: "main", Before: 11}, 10},
		{&cloisterpb.ListHistoryRequest{InstanceName: "main", Action: digest(5)[:64]}, 1},
		{&cloisterpb.ListHistoryRequest{InstanceName: "main", TargetId: "//u"}, 0},
		{&cloisterpb.ListHistoryRequest{InstanceName: "main", ActionMnemonic: "m*", CorrelatedInvocationsId: "c"}, 0},
	} {
		expect.Equal(t, len(must.Get(listed(t, c, c2.req))(t)), c2.want, "%v", c2.req)
	}
	for _, req := range []*cloisterpb.ListHistoryRequest{{Limit: -1}, {InstanceName: "blobs"}, {InstanceName: "main", AllInstances: true}} {
		expect.Code(t, expect.Err(listed(t, c, req)), codes.InvalidArgument, "%v", req)
	}
}

// rest returns the number of entries that a call has yet to send.
func rest(t *testing.T, s grpc.ServerStreamingClient[cloisterpb.ListHistoryResponse]) (n int) {
	t.Helper()
	for {
		page, err := s.Recv()
		if err == io.EOF {
			return n
		}
		must.Succeed(t, err)
		n += len(page.Entries)
	}
}

// TestUnreadListsDelayNobody: clients that do not receive their lists do not delay the lists of others.
func TestUnreadListsDelayNobody(t *testing.T) {
	l := open(t, Config{Dir: t.TempDir()})
	const entries = 10 * pageSize // more than the buffers of a call hold
	for i := range entries {
		l.Add(Entry{Action: digest(i), How: Executed, Target: strings.Repeat("t", maxText), Instance: "main"})
		if i%1000 == 0 {
			must.Succeed(t, l.flush(t.Context()))
		}
	}
	server := grpc.NewServer()
	must.Succeed(t, Register(server, l, castest.Instances(), nil))
	req := &cloisterpb.ListHistoryRequest{InstanceName: "main", Limit: entries}
	address := grpctest.Listen(t, server)
	a := cloisterpb.NewHistoryClient(grpctest.Dial(t, address, grpc.WithInitialWindowSize(64<<10)))
	var unread []grpc.ServerStreamingClient[cloisterpb.ListHistoryResponse]
	for range maxReaders {
		s := must.Get(a.List(t.Context(), req))(t)
		must.Get(s.Recv())(t) // the search has begun
		unread = append(unread, s)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	b := must.Get(cloisterpb.NewHistoryClient(grpctest.Dial(t, address)).List(ctx, req))(t)
	expect.Equal(t, rest(t, b), entries, "entries of the other client")
	for _, s := range unread {
		expect.Equal(t, rest(t, s), entries-pageSize, "entries left")
	}
}

// TestUnreadListsAreBounded: a call of List whose client does not receive counts towards a limit, beyond which calls
// fail at once.
func TestUnreadListsAreBounded(t *testing.T) {
	l := open(t, Config{Dir: t.TempDir()})
	const entries = 5 * pageSize // more than the buffers of a call hold
	for i := range entries {
		l.Add(Entry{Action: digest(i), How: Executed, Target: strings.Repeat("t", maxText), Instance: "main"})
	}
	must.Succeed(t, l.flush(t.Context()))
	server := grpc.NewServer()
	must.Succeed(t, Register(server, l, castest.Instances(), nil))
	address := grpctest.Listen(t, server)
	req := &cloisterpb.ListHistoryRequest{InstanceName: "main"}
	list := func() ([]*cloisterpb.HistoryEntry, error) {
		return listed(t, cloisterpb.NewHistoryClient(grpctest.Dial(t, address)), req)
	}
	slow := cloisterpb.NewHistoryClient(grpctest.Dial(t, address, grpc.WithInitialWindowSize(64<<10)))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	unread := must.Get(slow.List(ctx, req))(t)
	must.Get(unread.Header())(t) // the first page is on its way
	for range 8*maxReaders - 1 {
		l.lists <- struct{}{} // other lists
	}
	s := status.Convert(expect.Err(list()))
	expect.That(t, s.Code() == codes.ResourceExhausted && len(s.Details()) == 1, "got %v, want RESOURCE_EXHAUSTED with RetryInfo", s)
	expect.Equal(t, rest(t, unread), entries, "entries of the unread list")
	expect.Equal(t, len(must.Get(list())(t)), entries, "entries of another list")
}

// TestSearchThatWaitsToContinue: a search that waits to continue ends with its context, and takes no slot from others.
func TestSearchThatWaitsToContinue(t *testing.T) {
	l := open(t, Config{Dir: t.TempDir()})
	l.Add(Entry{Action: digest(1), How: Executed})
	ctx, cancel := context.WithCancel(t.Context())
	slot := &readerSlot{readers: l.readers}
	err := l.search(ctx, Filter{}, 2, slot, func(*Entry) error {
		return slot.suspend(ctx, func() error {
			for range maxReaders {
				l.readers <- struct{}{} // other searches
			}
			cancel()
			return nil
		})
	})
	expect.Error(t, err, context.Canceled)
	expect.Equal(t, len(l.readers), maxReaders, "slots of other searches")
}

func TestRegisterWithoutLog(t *testing.T) {
	expect.That(t, Register(grpc.NewServer(), nil, castest.Instances(), nil) != nil,
		"Register accepted a service without a log")
	expect.That(t, Register(grpc.NewServer(), &Log{}, nil, nil) != nil, "Register accepted a service without instances")
}
