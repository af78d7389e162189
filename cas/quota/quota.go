// SPDX-License-Identifier: Apache-2.0

// Package quota limits the concurrent calls and other resources of each caller of a server, so that no caller can lock
// out the others. A caller is an IP address or, if the server authenticates callers, a name at an IP address. A call
// beyond a limit fails with RESOURCE_EXHAUSTED and RetryInfo; it does not wait.
package quota

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

// A Kind is a kind of call or resource that has a limit.
type Kind int

// Kinds. Every call counts as one of Calls, and may count as one of another kind, too.
const (
	Calls      Kind = iota // calls in progress, except health checks
	Uploads                // calls of ByteStream.Write
	Executions             // calls that execute actions or wait for operations
	Queries                // calls that search the history, the operations or the blobs
	LogStreams             // log streams that are not finished
	kinds
)

// names are the kinds in flags and messages.
var names = [kinds]string{"calls", "uploads", "executions", "queries", "log-streams"}

// Limits are the limits of one caller by Kind; 0 means no limit. *Limits implements pflag.Value.
type Limits [kinds]int

// Default returns limits that no single build reaches: Bazel runs at most 5,000 actions at once.
func Default() Limits { return Limits{20_000, 10_000, 10_000, 32, 250} }

// Set implements pflag.Value. It changes only the named kinds.
func (l *Limits) Set(s string) error {
	for part := range strings.SplitSeq(s, ",") {
		name, value, _ := strings.Cut(part, "=")
		kind := slices.Index(names[:], name)
		n, err := strconv.Atoi(value)
		if kind < 0 || err != nil || n < 0 {
			return fmt.Errorf("write NAME=NUMBER, with one of the names %s; 0 means no limit", strings.Join(names[:], ", "))
		}
		l[kind] = n
	}
	return nil
}

// String implements pflag.Value.
func (l *Limits) String() string {
	var parts []string
	for k, n := range l {
		parts = append(parts, names[k]+"="+strconv.Itoa(n))
	}
	return strings.Join(parts, ",")
}

// Type implements pflag.Value.
func (l *Limits) Type() string { return "limits" }

// A Table counts the calls and resources of each caller of one server.
type Table struct {
	limits  Limits
	methods map[string]Kind
	name    func(context.Context) string

	mu   sync.Mutex
	held map[string]*[kinds]int // by caller; guarded by mu
}

// New returns an empty Table. methods maps full method names to the further kind of their calls. name returns the name
// of a call's caller, or "" if it is unknown; a nil name identifies callers by address alone.
func New(limits Limits, methods map[string]Kind, name func(context.Context) string) *Table {
	return &Table{limits: limits, methods: methods, name: name, held: map[string]*[kinds]int{}}
}

// Options returns gRPC server options that count calls. They must follow the options that authenticate callers.
func (t *Table) Options() []grpc.ServerOption {
	unary := func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		ctx, release, err := t.enter(ctx, info.FullMethod)
		if err != nil {
			return nil, err
		}
		defer release()
		return next(ctx, req)
	}
	stream := func(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		ctx, release, err := t.enter(s.Context(), info.FullMethod)
		if err != nil {
			return err
		}
		defer release()
		return next(srv, counted{s, ctx})
	}
	return []grpc.ServerOption{grpc.ChainUnaryInterceptor(unary), grpc.ChainStreamInterceptor(stream)}
}

// A counted stream has the account of its caller in its context.
type counted struct {
	grpc.ServerStream
	ctx context.Context
}

// Context implements grpc.ServerStream.
func (c counted) Context() context.Context { return c.ctx }

// An account identifies the caller of a call; the call's context contains it.
type account struct {
	table *Table
	name  string
}

type accountKey struct{}

// enter counts a call and returns its context with the account of the caller.
func (t *Table) enter(ctx context.Context, method string) (_ context.Context, release func(), err error) {
	if strings.HasPrefix(method, "/"+grpc_health_v1.Health_ServiceDesc.ServiceName+"/") {
		return ctx, func() {}, nil
	}
	a := account{t, address(ctx)}
	if t.name != nil {
		a.name = t.name(ctx) + "\x00" + a.name
	}
	if release, err = t.hold(a.name, Calls, t.methods[method]); err != nil {
		return nil, nil, err
	}
	return context.WithValue(ctx, accountKey{}, a), release, nil
}

// hold counts one of each distinct kind, or of none if a limit is reached.
func (t *Table) hold(caller string, all ...Kind) (release func(), err error) {
	all = slices.Compact(all)
	t.mu.Lock()
	defer t.mu.Unlock()
	held := t.held[caller]
	if held == nil {
		held = &[kinds]int{}
	}
	for _, k := range all {
		if n := t.limits[k]; n > 0 && held[k] >= n {
			return nil, Exhausted(fmt.Sprintf("too many %s: this client has %d, which is the limit; "+
				"retry later, or raise the server's --caller-limit %s", names[k], n, names[k]))
		}
	}
	for _, k := range all {
		held[k]++
	}
	t.held[caller] = held
	return sync.OnceFunc(func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		for _, k := range all {
			held[k]--
		}
		if *held == [kinds]int{} {
			delete(t.held, caller)
		}
	}), nil
}

// Hold counts one of a kind for the caller of a call until release is called, which may be after the call. Without a
// Table it counts nothing.
func Hold(ctx context.Context, k Kind) (release func(), err error) {
	a, ok := ctx.Value(accountKey{}).(account)
	if !ok {
		return func() {}, nil
	}
	return a.table.hold(a.name, k)
}

// Caller returns a key for the caller of a call; without a Table, it is the address.
func Caller(ctx context.Context) string {
	if a, ok := ctx.Value(accountKey{}).(account); ok {
		return a.name
	}
	return address(ctx)
}

// address returns the address of a call's client without the port.
func address(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return ""
	}
	host, _, err := net.SplitHostPort(p.Addr.String())
	if err != nil {
		return p.Addr.String()
	}
	return host
}

// Exhausted returns RESOURCE_EXHAUSTED with RetryInfo.
func Exhausted(text string) error {
	s, err := status.New(codes.ResourceExhausted, text).WithDetails(
		&errdetails.RetryInfo{RetryDelay: durationpb.New(5 * time.Second)})
	if err != nil {
		panic(err) // the details are a known message
	}
	return s.Err()
}
