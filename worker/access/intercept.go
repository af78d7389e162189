// SPDX-License-Identifier: Apache-2.0

package access

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/x509"
	"encoding/asn1"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/tap"
)

// Options returns server options for the clients' port that check every call: unknown callers get UNAUTHENTICATED,
// callers without the right PERMISSION_DENIED. The first message of a stream decides.
func (r *Rules) Options() []grpc.ServerOption {
	return guard{rules: r.always, table: methods}.options()
}

func (r *Rules) always() *Rules { return r }

// A guard checks the calls of one port.
type guard struct {
	rules func() *Rules // the current rules
	table table
	live  *Live // nil if the rules never change
}

func (g guard) options() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.InTapHandle(g.limitUnauthenticated), grpc.ChainUnaryInterceptor(g.unary), grpc.ChainStreamInterceptor(g.stream),
	}
}

// unauthenticatedTimeout is the time limit for the first message of a call without a valid credential. gRPC reads that
// message, up to 16 MiB and 1000 per connection, before it calls an interceptor, so the limit bounds what such callers
// can make the server hold.
const unauthenticatedTimeout = 2 * time.Second

// An unauthenticatedCall is in the context of a call without a valid credential.
type unauthenticatedCall struct {
	end *time.Timer // cancels the call
	why error       // why the credential is invalid; nil if none is needed
}

// unauthenticatedKey is the context key of a *unauthenticatedCall.
type unauthenticatedKey struct{}

// limitUnauthenticated implements tap.ServerInHandle, which sees the headers of a call. It does not refuse calls, since
// gRPC would keep the headers of a refused call until its deadline.
func (g guard) limitUnauthenticated(ctx context.Context, call *tap.Info) (context.Context, error) {
	c, err := g.admit(ctx, call.FullMethodName)
	if err == nil && c.name != "" {
		return ctx, nil
	}
	ctx, cancel := context.WithCancel(ctx) // gRPC cancels the parent when the call ends
	end := time.AfterFunc(unauthenticatedTimeout, cancel)
	return context.WithValue(ctx, unauthenticatedKey{}, &unauthenticatedCall{end, err}), nil
}

// arrived stops the time limit of an unauthenticated call after its first message.
func arrived(ctx context.Context) {
	if s, ok := ctx.Value(unauthenticatedKey{}).(*unauthenticatedCall); ok {
		s.end.Stop()
	}
}

func (g guard) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	arrived(ctx)
	c, err := g.admit(ctx, info.FullMethod)
	if err == nil {
		err = g.table.permit(c, info.FullMethod, req)
	}
	if err != nil {
		return nil, err
	}
	ctx = context.WithValue(ctx, callerKey{}, c)
	if g.live == nil || !waits[info.FullMethod] {
		return next(ctx, req)
	}
	return g.wait(ctx, req, info.FullMethod, next)
}

// wait makes a call that ends when its caller loses the right to it.
func (g guard) wait(ctx context.Context, req any, method string, next grpc.UnaryHandler) (any, error) {
	call, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer g.live.wait(&waiter{ctx: ctx, refused: cancel, table: g.table, method: method, message: req})()
	answer, err := next(call, req)
	if call.Err() != nil && ctx.Err() == nil {
		return nil, context.Cause(call)
	}
	return answer, err
}

func (g guard) stream(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	c, err := g.admit(s.Context(), info.FullMethod)
	if err != nil {
		return err
	}
	guarded := &guarded{ServerStream: s, table: g.table, caller: c, method: info.FullMethod}
	if err := next(srv, guarded); guarded.refusal == nil {
		return err
	}
	return guarded.refusal // takes precedence over the service's error
}

// admit returns the caller, or an empty one if the method is open to everybody.
func (g guard) admit(ctx context.Context, method string) (*caller, error) {
	if d, ok := g.table[method]; ok && d.rights == 0 {
		return &caller{}, nil
	}
	if s, ok := ctx.Value(unauthenticatedKey{}).(*unauthenticatedCall); ok && s.why != nil {
		return nil, s.why // without verifying a signature twice
	}
	return g.rules().caller(ctx)
}

// A guarded stream checks its first message.
type guarded struct {
	grpc.ServerStream
	table   table
	caller  *caller
	method  string
	passed  bool
	refusal error
}

// Context implements grpc.ServerStream.
func (g *guarded) Context() context.Context {
	return context.WithValue(g.ServerStream.Context(), callerKey{}, g.caller)
}

// RecvMsg implements grpc.ServerStream. One goroutine at a time calls it.
func (g *guarded) RecvMsg(m any) error {
	if g.refusal != nil {
		return g.refusal
	}
	err := g.ServerStream.RecvMsg(m)
	if err == nil && !g.passed {
		arrived(g.ServerStream.Context())
		g.refusal = g.table.permit(g.caller, g.method, m)
		g.passed = g.refusal == nil
		err = g.refusal
	}
	return err
}

// caller returns the caller identified by the authorization header, or else by the certificate, or else the anonymous
// one.
func (r *Rules) caller(ctx context.Context) (*caller, error) {
	if r.refusal != nil {
		return nil, r.refusal
	}
	ctx = identity(ctx)
	md, _ := metadata.FromIncomingContext(ctx)
	switch values := md.Get("authorization"); len(values) {
	case 0:
	case 1:
		return r.bearer(values[0])
	default:
		return nil, unauthenticated("the header authorization occurs %d times", len(values))
	}
	leaf := clientCertificate(ctx)
	if leaf != nil {
		for _, c := range r.callers {
			if c.certificate != nil && matches(leaf, c.certificate) {
				return c, nil
			}
		}
	}
	for _, c := range r.callers {
		if c.anonymous {
			return c, nil
		}
	}
	if leaf != nil {
		return nil, unauthenticated("the client certificate of %+.200q belongs to no caller of this server", leaf.Subject.String())
	}
	return nil, unauthenticated("no credential: this server requires a client certificate or the header authorization: Bearer TOKEN")
}

// identity returns a context with the credentials of a call's caller. A call of an action has those of the client that
// requested the action; its own headers are ignored.
func identity(ctx context.Context) context.Context {
	if p, ok := peer.FromContext(ctx); ok {
		if action, ok := p.AuthInfo.(interface{ Identity() context.Context }); ok {
			return action.Identity()
		}
	}
	return ctx
}

// clientCertificate returns the verified client certificate of the connection, or nil.
func clientCertificate(ctx context.Context) *x509.Certificate {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(info.State.VerifiedChains) == 0 {
		return nil
	}
	return info.State.VerifiedChains[0][0]
}

// matches reports whether a certificate has all wanted names, which are keyed by subject, uri and dns.
func matches(leaf *x509.Certificate, wanted map[string]string) bool {
	for kind, name := range wanted {
		found := false
		switch kind {
		case "subject":
			found = oneCommonName(leaf) && pattern(name).match(leaf.Subject.CommonName)
		case "uri":
			found = uriMatches(leaf.URIs, pattern(name))
		case "dns":
			for _, d := range leaf.DNSNames {
				found = found || pattern(name).match(d)
			}
		}
		if !found {
			return false
		}
	}
	return true
}

// oneCommonName reports whether a certificate has exactly one common name, and not an empty one. If there are several,
// programs disagree about which one counts, and an authority may have checked another one.
func oneCommonName(leaf *x509.Certificate) bool {
	names := 0
	for _, part := range leaf.Subject.Names {
		if part.Type.Equal(asn1.ObjectIdentifier{2, 5, 4, 3}) {
			names++
		}
	}
	return names == 1 && leaf.Subject.CommonName != ""
}

// uriMatches reports whether a URI of a certificate matches want. A SPIFFE ID must be the only one, as its standard
// demands.
func uriMatches(uris []*url.URL, want pattern) bool {
	spiffe := slices.ContainsFunc(uris, func(u *url.URL) bool { return u.Scheme == "spiffe" })
	return (len(uris) == 1 || !spiffe) && slices.ContainsFunc(uris, func(u *url.URL) bool {
		text := u.String()
		return want.match(text) && (!want.strict() || checkURI(text) == nil)
	})
}

// strict reports whether the URI pattern p is a prefix or a SPIFFE ID.
func (p pattern) strict() bool {
	return strings.HasSuffix(string(p), "*") || strings.HasPrefix(string(p), "spiffe:")
}

// checkURI returns an error for a URI that SPIFFE forbids. Its text may be below a prefix although it names something
// else.
func checkURI(uri string) error {
	if strings.ContainsAny(uri, "%?#") {
		return errors.New("percent encoding, a query or a fragment")
	}
	if _, rest, ok := strings.Cut(uri, "://"); ok {
		uri = rest
	}
	for segment := range strings.SplitSeq(uri, "/") {
		if segment == "" || segment == "." || segment == ".." {
			return fmt.Errorf("the segment %q", segment)
		}
	}
	return nil
}

// maxToken is the size limit of a token.
const maxToken = 16 << 10

// bearer returns the caller identified by an authorization header.
func (r *Rules) bearer(header string) (*caller, error) {
	scheme, token, _ := strings.Cut(header, " ")
	token = strings.TrimSpace(token)
	if !strings.EqualFold(scheme, "Bearer") || token == "" || len(token) > maxToken {
		return nil, unauthenticated("the header authorization must be Bearer TOKEN, with a token of at most %d bytes", maxToken)
	}
	sum := sha256.Sum256([]byte(token))
	var found *caller
	for _, c := range r.callers {
		for i := range c.tokens {
			// The comparison takes constant time, whichever byte differs and whichever caller has the token.
			if subtle.ConstantTimeCompare(sum[:], c.tokens[i][:]) == 1 && found == nil {
				found = c
			}
		}
	}
	if found != nil {
		return found, nil
	}
	return r.signed(token, sum)
}
