// SPDX-License-Identifier: Apache-2.0

// Package access decides who may call what: an operator's file names callers, how each is known and which rights it
// has, and interceptors of gRPC hold every call against it. It executes no call, stores nothing, and knows of a request
// its method and the instance that it names.
//
// It fails closed: a file with a mistake permits nothing, a method that is in no table is nobody's, and a credential
// that is no good is refused rather than ignored. No token is kept or stands in a message: files hold the SHA-256 of a
// token, and signed tokens are held against keys.
package access

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cmd/internal/filestate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A Right is what a caller may do, one bit for each.
type Right uint8

const (
	Read    Right = 1 << iota // blobs and results
	Write                     // blobs
	Cache                     // results, by UpdateActionResult
	Execute                   // actions, and see what became of them
	Work                      // be given actions, and all that a worker needs for them, at the workers' own port
	Operate                   // the server: drain its workers, and see what they do for whichever instance
)

var rightNames = map[string]Right{"read": Read, "write": Write, "cache": Cache, "execute": Execute, "work": Work, "operate": Operate}

// String names the rights, any of which is meant.
func (r Right) String() string {
	var names []string
	for i, name := range []string{"read", "write", "cache", "execute", "work", "operate"} {
		if r&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, " or ")
}

// everything is all rights.
const everything = Read | Write | Cache | Execute | Work | Operate

// A caller is one entry of the file: how somebody is known, and what he may do.
type caller struct {
	name        string
	anonymous   bool
	tokens      [][32]byte // SHA-256 of what he shows
	certificate map[string]string
	jwt         *issuer
	rights      map[Right][]pattern // by single right
}

// may reports whether c has one of the rights in the instance.
func (c *caller) may(any Right, instance string) bool {
	for right, patterns := range c.rights {
		if any&right != 0 && slices.ContainsFunc(patterns, func(p pattern) bool { return p.match(instance) }) {
			return true
		}
	}
	return false
}

// somewhere reports whether c has one of the rights in an instance, whichever.
func (c *caller) somewhere(any Right) bool {
	for right := range c.rights {
		if any&right != 0 {
			return true
		}
	}
	return false
}

// A pattern is a name, or PREFIX/* for all names below, or * for all.
type pattern string

func (p pattern) match(name string) bool {
	if prefix, ok := strings.CutSuffix(string(p), "*"); ok && (prefix == "" || strings.HasSuffix(prefix, "/")) {
		return strings.HasPrefix(name, prefix)
	}
	return name == string(p)
}

// meets reports whether p matches the name prefix, or one that may be below it.
func (p pattern) meets(prefix string) bool {
	name, below := strings.CutSuffix(string(p), "*")
	below = below && (name == "" || strings.HasSuffix(name, "/"))
	return prefix == "" || strings.HasPrefix(string(p)+"/", prefix+"/") || below && strings.HasPrefix(prefix, name)
}

// Rules are who may do what. They are safe for concurrent use, and never change; ReadFile makes them.
type Rules struct {
	callers  []*caller
	read     map[string]filestate.State // files that they are of, as these were
	patience time.Duration              // with strangers, 0 is strangerPatience

	mu       sync.Mutex
	verified map[[32]byte]verified // guarded by mu; signed tokens by their SHA-256
}

// verified is a signed token that was found good.
type verified struct {
	caller *caller
	until  time.Time
}

// Certificates reports whether a caller is known by his certificate.
func (r *Rules) Certificates() bool {
	return slices.ContainsFunc(r.callers, func(c *caller) bool { return c.certificate != nil })
}

// Tokens reports whether a caller is known by what stands in a header, which whoever sees the connection can read.
func (r *Rules) Tokens() bool {
	return slices.ContainsFunc(r.callers, func(c *caller) bool { return c.tokens != nil || c.jwt != nil })
}

// callerKey is the key of the caller in the context of a call.
type callerKey struct{}

// Rights reports what the caller of a call that has passed the interceptors may do in an instance: have actions
// executed, and write results.
func (r *Rules) Rights(ctx context.Context, instance string) (execute, cache bool) {
	c, ok := ctx.Value(callerKey{}).(*caller)
	return ok && c.may(Execute, instance), ok && c.may(Cache, instance)
}

// WorkerRights is Rights at the workers' port: nobody has actions executed there, and every worker writes results.
func (r *Rules) WorkerRights(ctx context.Context, instance string) (execute, cache bool) {
	c, ok := ctx.Value(callerKey{}).(*caller)
	return false, ok && c.may(Work, instance)
}

// Sees reports whether the caller of a call that has passed the interceptors may know what runs in an instance.
func (r *Rules) Sees(ctx context.Context, instance string) bool {
	c, ok := ctx.Value(callerKey{}).(*caller)
	return ok && c.may(Execute|Operate, instance)
}

// SeesBelow reports whether there may be an instance of the name prefix, or below it, of which Sees is true.
func (r *Rules) SeesBelow(ctx context.Context, prefix string) bool {
	c, ok := ctx.Value(callerKey{}).(*caller)
	if !ok {
		return false
	}
	for right, patterns := range c.rights {
		if right&(Execute|Operate) != 0 && slices.ContainsFunc(patterns, func(p pattern) bool { return p.meets(prefix) }) {
			return true
		}
	}
	return false
}

// Caller returns the name of the caller of a call that has passed the interceptors.
func (r *Rules) Caller(ctx context.Context) string {
	c, ok := ctx.Value(callerKey{}).(*caller)
	if !ok {
		return ""
	}
	return c.name
}

// permit returns nil if c may call method with message m, and else a status.
func (t table) permit(c *caller, method string, m any) error {
	d, ok := t[method]
	if !ok {
		return status.Errorf(codes.PermissionDenied, "method %+.200q: no right permits it", method)
	}
	if d.rights == 0 {
		return nil
	}
	var instances []string
	if d.of != nil {
		var err error
		if instances, err = d.of(m); err != nil {
			return status.Errorf(codes.InvalidArgument, "%s: %v", method, err)
		}
	}
	if instances == nil {
		if !c.somewhere(d.rights) {
			return status.Errorf(codes.PermissionDenied, "caller %s has the right %s in no instance, which %s needs", c.name, d.rights, method)
		}
		return nil
	}
	for _, instance := range instances {
		if !c.may(d.rights, instance) {
			return status.Errorf(codes.PermissionDenied, "caller %s does not have the right %s in instance %+.200q, which %s needs",
				c.name, d.rights, instance, method)
		}
	}
	return nil
}

// unauthenticated returns the status for a call by nobody who is known.
func unauthenticated(format string, args ...any) error {
	return status.Error(codes.Unauthenticated, fmt.Sprintf(format, args...))
}
