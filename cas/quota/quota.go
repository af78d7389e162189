// SPDX-License-Identifier: Apache-2.0

// Package quota limits the concurrent calls and other resources of each caller and each instance of a server, so that
// none can lock out the others. A caller is an IP address or, if the server authenticates callers, a name at an IP
// address. A call beyond a limit fails with RESOURCE_EXHAUSTED and RetryInfo; it does not wait.
package quota

import (
	"context"
	"fmt"
	"maps"
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
	Uploads                // calls that store, split or splice blobs, or publish build events
	Executions             // calls that execute actions or wait for operations
	Queries                // calls that search or read operations, blobs, the history, builds, the fleet or the audit log
	LogStreams             // log streams that are not finished
	kinds
)

// names are the kinds in flags and messages.
var names = [kinds]string{"calls", "uploads", "executions", "queries", "log-streams"}

// counts has a number for each Kind.
type counts [kinds]int

// Limits are limits by Kind, for everyone and for some by name; 0 means no limit. *Limits implements pflag.Value.
type Limits struct {
	all   counts
	named map[string]counts // negative where all applies
}

// Default returns limits for a caller that no single build reaches: Bazel runs at most 5,000 actions at once.
func Default() Limits { return Limits{all: counts{20_000, 10_000, 10_000, 32, 250}} }

// DefaultInstance returns limits for an instance: those of eight callers, but fewer log streams than a server has.
func DefaultInstance() Limits { return Limits{all: counts{160_000, 80_000, 80_000, 256, 750}} }

// Set implements pflag.Value. It changes only the kinds that it names, for everyone or for one name.
func (l *Limits) Set(s string) error {
	first, _, _ := strings.Cut(s, ",")
	end := strings.LastIndex(first[:max(0, strings.LastIndex(first, "="))], "=")
	if end < 0 {
		return l.all.set(s)
	}
	name, rest := s[:end], s[end+1:]
	c, ok := l.named[name]
	if !ok {
		c = counts{-1, -1, -1, -1, -1}
	}
	if err := c.set(rest); err != nil {
		return err
	}
	l.named = maps.Clone(l.named)
	if l.named == nil {
		l.named = map[string]counts{}
	}
	l.named[name] = c
	return nil
}

// set parses KIND=NUMBER,...
func (c *counts) set(s string) error {
	for part := range strings.SplitSeq(s, ",") {
		name, value, _ := strings.Cut(part, "=")
		kind := slices.Index(names[:], name)
		n, err := strconv.Atoi(value)
		if kind < 0 || err != nil || n < 0 {
			return fmt.Errorf("write NAME=NUMBER, with one of the names %s; 0 means no limit", strings.Join(names[:], ", "))
		}
		c[kind] = n
	}
	return nil
}

// String implements pflag.Value.
func (l *Limits) String() string {
	all := []string{l.all.text()}
	for _, name := range slices.Sorted(maps.Keys(l.named)) {
		all = append(all, name+"="+l.named[name].text())
	}
	return strings.Join(all, ";")
}

// text returns the kinds with a number that is not negative.
func (c counts) text() string {
	var parts []string
	for k, n := range c {
		if n >= 0 {
			parts = append(parts, names[k]+"="+strconv.Itoa(n))
		}
	}
	return strings.Join(parts, ",")
}

// of returns the limit of a name.
func (l *Limits) of(name string, k Kind) int {
	if c, ok := l.named[name]; ok && c[k] >= 0 {
		return c[k]
	}
	return l.all[k]
}

// Type implements pflag.Value.
func (l *Limits) Type() string { return "limits" }

// Config configures a Table.
type Config struct {
	// Callers are the limits of each caller. Names are those of callers, or their addresses if callers have no names.
	Callers Limits
	// Instances are the limits of each instance, for all callers together.
	Instances Limits
	// Methods maps full method names to the further kind of their calls.
	Methods map[string]Kind
	// Instance, if not nil, returns the instance that the first message of a call names, and whether it names one.
	Instance func(method string, message any) (string, bool)
	// Name, if not nil, returns the name of a call's caller, or "" if it is unknown. Without it, callers are identified
	// by address alone.
	Name func(context.Context) string
}

// A Table counts the calls and resources of each caller and each instance of one server.
type Table struct {
	Config

	mu   sync.Mutex
	held map[holder]*counts // guarded by mu
}

// A holder is a caller or an instance.
type holder struct {
	instance bool
	name     string
	address  string // of a caller
}

// New returns an empty Table.
func New(c Config) *Table { return &Table{Config: c, held: map[holder]*counts{}} }

// Options returns gRPC server options that count calls. They must follow the options that authenticate callers.
func (t *Table) Options() []grpc.ServerOption {
	unary := func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		a := t.account(ctx)
		a.holders = append(a.holders, t.instance(info.FullMethod, req)...)
		release, err := a.enter(info.FullMethod)
		if err != nil {
			return nil, err
		}
		defer release()
		return next(context.WithValue(ctx, accountKey{}, a), req)
	}
	stream := func(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		a := t.account(s.Context())
		release, err := a.enter(info.FullMethod)
		if err != nil {
			return err
		}
		defer release()
		c := &counted{ServerStream: s, ctx: context.WithValue(s.Context(), accountKey{}, a), table: t, method: info.FullMethod}
		defer c.end()
		if err := next(srv, c); c.refusal == nil {
			return err
		}
		return c.refusal // takes precedence over the service's error
	}
	return []grpc.ServerOption{grpc.ChainUnaryInterceptor(unary), grpc.ChainStreamInterceptor(stream)}
}

// A counted stream has the account of its caller in its context, and counts for the instance that its first message
// names.
type counted struct {
	grpc.ServerStream
	ctx     context.Context
	table   *Table
	method  string
	release func() // nil before the first message
	refusal error
}

// Context implements grpc.ServerStream.
func (c *counted) Context() context.Context { return c.ctx }

// RecvMsg implements grpc.ServerStream. One goroutine at a time calls it.
func (c *counted) RecvMsg(m any) error {
	if c.refusal != nil {
		return c.refusal
	}
	err := c.ServerStream.RecvMsg(m)
	if err == nil && c.release == nil {
		c.release, c.refusal = account{c.table, c.table.instance(c.method, m)}.enter(c.method)
		err = c.refusal
	}
	return err
}

// end ends the count for the instance. No RecvMsg runs.
func (c *counted) end() {
	if c.release != nil {
		c.release()
	}
}

// An account has those for which a call counts; the call's context contains it.
type account struct {
	table   *Table
	holders []holder
}

type accountKey struct{}

// account returns the account of a call's caller.
func (t *Table) account(ctx context.Context) account {
	h := holder{address: address(ctx)}
	if t.Name != nil {
		h.name = t.Name(ctx)
	}
	return account{t, []holder{h}}
}

// instance returns the instance that a message names, if any.
func (t *Table) instance(method string, m any) []holder {
	if t.Instance == nil {
		return nil
	}
	name, ok := t.Instance(method, m)
	if !ok {
		return nil
	}
	return []holder{{instance: true, name: name}}
}

// enter counts a call.
func (a account) enter(method string) (release func(), err error) {
	if strings.HasPrefix(method, "/"+grpc_health_v1.Health_ServiceDesc.ServiceName+"/") {
		return func() {}, nil
	}
	return a.hold(Calls, a.table.Methods[method])
}

// hold counts one of each distinct kind for each holder, or of none if a limit is reached.
func (a account) hold(all ...Kind) (release func(), err error) {
	all = slices.Compact(all)
	t := a.table
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, h := range a.holders {
		held := t.held[h]
		for _, k := range all {
			if n := t.limit(h, k); held != nil && n > 0 && held[k] >= n {
				return nil, Exhausted(fmt.Sprintf("too many %s: %s has %d, which is the limit; retry later, or raise the server's %s %s",
					names[k], h, n, h.flag(), names[k]))
			}
		}
	}
	for _, h := range a.holders {
		if t.held[h] == nil {
			t.held[h] = &counts{}
		}
		t.held[h].add(all, 1)
	}
	return sync.OnceFunc(func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		for _, h := range a.holders {
			if t.held[h].add(all, -1); *t.held[h] == (counts{}) {
				delete(t.held, h)
			}
		}
	}), nil
}

// add adds n to the kinds.
func (c *counts) add(all []Kind, n int) {
	for _, k := range all {
		c[k] += n
	}
}

// limit returns the limit of a holder.
func (t *Table) limit(h holder, k Kind) int {
	switch {
	case h.instance:
		return t.Instances.of(h.name, k)
	case t.Name == nil:
		return t.Callers.of(h.address, k)
	}
	return t.Callers.of(h.name, k)
}

// String names the holder in messages.
func (h holder) String() string {
	if h.instance {
		return fmt.Sprintf("instance %+.256q", h.name)
	}
	return "this client"
}

func (h holder) flag() string {
	if h.instance {
		return "--instance-limit"
	}
	return "--caller-limit"
}

// Hold counts one of a kind for the caller of a call, and for the instance that its request names, until release is
// called, which may be after the call. Without a Table it counts nothing.
func Hold(ctx context.Context, k Kind) (release func(), err error) {
	a, ok := ctx.Value(accountKey{}).(account)
	if !ok {
		return func() {}, nil
	}
	return a.hold(k)
}

// Caller returns a key for the caller of a call; without a Table, it is the address.
func Caller(ctx context.Context) string {
	if a, ok := ctx.Value(accountKey{}).(account); ok {
		return a.holders[0].name + "\x00" + a.holders[0].address
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
