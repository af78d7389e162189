// SPDX-License-Identifier: Apache-2.0

// Package access authenticates and authorizes calls. An operator's file lists callers with their credentials and
// rights, and gRPC interceptors check every call. The package looks only at the method of a request and the instance
// that it names.
//
// NewLive reads a file, and again when it changes. Its Options are for the gRPC server of clients, its WorkerOptions
// for that of workers, and the Live itself is the Access of package service. The options apply to every service of the
// gRPC server: methods other than Cloister's are refused.
//
// It fails closed: a file with a mistake permits nothing, a method without a table entry is refused, and an invalid
// credential is refused rather than ignored. Tokens are neither stored nor printed: files contain their SHA-256, and
// signed tokens are verified with public keys.
package access

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cloister-build/cloister/worker/internal/filestate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A permission is a set of rights, one bit each.
type permission uint8

// Rights of callers.
const (
	rightRead    permission = 1 << iota // read blobs and results
	rightWrite                          // write blobs
	rightCache                          // write results with UpdateActionResult
	rightExecute                        // execute actions and use their operations
	rightWork                           // at the workers' port: take actions, and everything that this requires
	rightOperate                        // drain workers, manage the store and images, and see the work of all instances
)

// rightNames has the names of the rights by bit.
var rightNames = []string{"read", "write", "cache", "execute", "work", "operate"}

// parseRight returns the right of that name.
func parseRight(name string) (permission, bool) {
	i := slices.Index(rightNames, name)
	return 1 << max(i, 0), i >= 0
}

// String joins the names of the rights by "or".
func (r permission) String() string {
	var names []string
	for i, name := range rightNames {
		if r&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, " or ")
}

// A caller is one entry of the file: a credential and its rights.
type caller struct {
	name        string
	anonymous   bool
	tokens      [][32]byte // SHA-256 of bearer tokens
	certificate map[string]string
	jwt         *issuer
	rights      map[permission][]pattern // by single right
}

// may reports whether c has one of the rights in instance.
func (c *caller) may(any permission, instance string) bool {
	for right, patterns := range c.rights {
		if any&right != 0 && slices.ContainsFunc(patterns, func(p pattern) bool { return p.match(instance) }) {
			return true
		}
	}
	return false
}

// somewhere reports whether c has one of the rights in any instance.
func (c *caller) somewhere(any permission) bool {
	for right := range c.rights {
		if any&right != 0 {
			return true
		}
	}
	return false
}

// A pattern is a name, PREFIX/* for all names below PREFIX, or * for all names.
type pattern string

func (p pattern) match(name string) bool {
	if prefix, ok := strings.CutSuffix(string(p), "*"); ok && (prefix == "" || strings.HasSuffix(prefix, "/")) {
		return strings.HasPrefix(name, prefix)
	}
	return name == string(p)
}

// example returns a name that p matches.
func (p pattern) example() string {
	if prefix, ok := strings.CutSuffix(string(p), "*"); ok {
		return prefix + "x"
	}
	return string(p)
}

// meets reports whether p matches prefix or some name below it.
func (p pattern) meets(prefix string) bool {
	name, below := strings.CutSuffix(string(p), "*")
	below = below && (name == "" || strings.HasSuffix(name, "/"))
	return prefix == "" || strings.HasPrefix(string(p)+"/", prefix+"/") || below && strings.HasPrefix(prefix, name)
}

// Rules are the callers of a file. They are immutable and safe for concurrent use. Use ReadFile; the zero Rules admit
// nobody.
type Rules struct {
	admitted
	callers []*caller
	read    map[string]source // the files they were read from
	risks   []string          // returned by Warnings
	refusal error             // of every call; nil to check it

	mu       sync.Mutex
	verified map[[32]byte]verified // guarded by mu; signed tokens by SHA-256
}

// A source is a version of a file.
type source struct {
	state filestate.State
	sum   [32]byte // SHA-256 of its contents
}

// verified is the caller of a verified signed token.
type verified struct {
	caller *caller
	until  time.Time
}

// Certificates reports whether some caller has a certificate as its credential.
func (r *Rules) Certificates() bool {
	return slices.ContainsFunc(r.callers, func(c *caller) bool { return c.certificate != nil })
}

// Tokens reports whether some caller has a token as its credential, which is readable on an unencrypted connection.
func (r *Rules) Tokens() bool {
	return slices.ContainsFunc(r.callers, func(c *caller) bool { return c.tokens != nil || c.jwt != nil })
}

// Warnings describes rules that probably permit more than their author intends, and how to correct them.
func (r *Rules) Warnings() []string { return r.risks }

// admitted reports the rights of the caller of an admitted call under the rules in force when the call arrived.
type admitted struct{}

// callerKey is the context key of a call's caller.
type callerKey struct{}

// Rights reports whether the caller of an admitted call may execute actions and write results in instance.
func (admitted) Rights(ctx context.Context, instance string) (execute, cache bool) {
	c, ok := ctx.Value(callerKey{}).(*caller)
	return ok && c.may(rightExecute, instance), ok && c.may(rightCache, instance)
}

// WorkerRights is Rights at the workers' port, where nobody executes actions and every worker writes results.
func (admitted) WorkerRights(ctx context.Context, instance string) (execute, cache bool) {
	c, ok := ctx.Value(callerKey{}).(*caller)
	return false, ok && c.may(rightWork, instance)
}

// Reads reports whether the caller of an admitted call may read the blobs and the history of instance.
func (admitted) Reads(ctx context.Context, instance string) bool {
	c, ok := ctx.Value(callerKey{}).(*caller)
	return ok && c.may(rightRead, instance)
}

// Sees reports whether the caller of an admitted call may see what runs in instance.
func (admitted) Sees(ctx context.Context, instance string) bool {
	c, ok := ctx.Value(callerKey{}).(*caller)
	return ok && c.may(rightExecute|rightOperate, instance)
}

// SeesBelow reports whether Sees may be true for the instance prefix or an instance below it.
func (admitted) SeesBelow(ctx context.Context, prefix string) bool {
	c, ok := ctx.Value(callerKey{}).(*caller)
	if !ok {
		return false
	}
	for right, patterns := range c.rights {
		if right&(rightExecute|rightOperate) != 0 && slices.ContainsFunc(patterns, func(p pattern) bool { return p.meets(prefix) }) {
			return true
		}
	}
	return false
}

// Caller returns the name of the caller of an admitted call.
func (admitted) Caller(ctx context.Context) string {
	c, ok := ctx.Value(callerKey{}).(*caller)
	if !ok {
		return ""
	}
	return c.name
}

// permit returns a status error unless c may call method with message m.
func (t table) permit(c *caller, method string, m any) error {
	d, ok := t[method]
	if !ok {
		return status.Errorf(codes.PermissionDenied, "no right permits method %+.200q", method)
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
			return status.Errorf(codes.PermissionDenied, "caller %s has the right %s in no instance, but %s needs it",
				c.name, d.rights, method)
		}
		return nil
	}
	for _, instance := range instances {
		if !c.may(d.rights, instance) {
			return status.Errorf(codes.PermissionDenied, "caller %s does not have the right %s in instance %+.200q, but %s needs it",
				c.name, d.rights, instance, method)
		}
	}
	return nil
}

// unauthenticated returns the status error for an unknown caller.
func unauthenticated(format string, args ...any) error {
	return status.Error(codes.Unauthenticated, fmt.Sprintf(format, args...))
}
