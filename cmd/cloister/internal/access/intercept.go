// SPDX-License-Identifier: Apache-2.0

package access

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/x509"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/tap"
)

// Options returns the options of a server for clients that hold every call against the rules. A call by nobody who is
// known is UNAUTHENTICATED, one by somebody who may not make it PERMISSION_DENIED; of a stream the first message decides.
func (r *Rules) Options() []grpc.ServerOption { return guard{r.always, methods}.options() }

// WorkerOptions is Options of a server for workers.
func (r *Rules) WorkerOptions() []grpc.ServerOption { return guard{r.always, workers}.options() }

func (r *Rules) always() *Rules { return r }

// A guard stands at one port.
type guard struct {
	rules func() *Rules // as they are now
	table table
}

func (g guard) options() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.InTapHandle(g.hurry), grpc.ChainUnaryInterceptor(g.unary), grpc.ChainStreamInterceptor(g.stream)}
}

// strangerPatience is how long a call without a good credential may take to send its first message, which gRPC reads
// before it asks an interceptor: up to 16 MiB, and 1000 of them on one connection. So what strangers can make this
// server hold is what they can send in that time.
const strangerPatience = 2 * time.Second

// A stranger is in the context of a call without a good credential.
type stranger struct {
	end *time.Timer // ends the call
	why error       // the credential is no good; nil where none is needed
}

// strangerKey is the key of a *stranger.
type strangerKey struct{}

// hurry implements tap.ServerInHandle: it sees the headers of a call. It refuses none itself, since gRPC would keep the
// deadline of such a call, and all of its headers, until that has passed.
func (g guard) hurry(ctx context.Context, call *tap.Info) (context.Context, error) {
	c, err := g.admit(ctx, call.FullMethodName)
	if err == nil && c.name != "" {
		return ctx, nil
	}
	ctx, cancel := context.WithCancel(ctx) // gRPC cancels what it is made from when the call ends
	return context.WithValue(ctx, strangerKey{}, &stranger{time.AfterFunc(cmp.Or(g.rules().patience, strangerPatience), cancel), err}), nil
}

// arrived notes that the first message of a call is there.
func arrived(ctx context.Context) {
	if s, ok := ctx.Value(strangerKey{}).(*stranger); ok {
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
	return next(context.WithValue(ctx, callerKey{}, c), req)
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
	return guarded.refusal // whatever the service made of it
}

// admit returns who calls, or nobody where the method is for everybody.
func (g guard) admit(ctx context.Context, method string) (*caller, error) {
	if d, ok := g.table[method]; ok && d.rights == 0 {
		return &caller{}, nil
	}
	if s, ok := ctx.Value(strangerKey{}).(*stranger); ok && s.why != nil {
		return nil, s.why // a signature is not verified twice
	}
	return g.rules().caller(ctx)
}

// A guarded stream lets its first message pass if the caller may send it.
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

// RecvMsg implements grpc.ServerStream. It is called by one goroutine at a time.
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

// caller returns who calls: whom the token in the header names, or else the certificate, or else "anonymous", where
// there is one.
func (r *Rules) caller(ctx context.Context) (*caller, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	switch values := md.Get("authorization"); len(values) {
	case 0:
	case 1:
		return r.bearer(values[0])
	default:
		return nil, unauthenticated("the header authorization is there %d times", len(values))
	}
	leaf := certificate(ctx)
	if leaf != nil {
		for _, c := range r.callers {
			if c.certificate != nil && shows(leaf, c.certificate) {
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
		return nil, unauthenticated("the client certificate of %+.200q is that of no caller of this server", leaf.Subject.String())
	}
	return nil, unauthenticated("no credential: this server wants a client certificate, or the header authorization with Bearer TOKEN")
}

// certificate returns the certificate of the caller's that the connection has verified, or nil.
func certificate(ctx context.Context) *x509.Certificate {
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

// shows reports whether a certificate has all the names that are wanted, of the kinds subject, uri and dns.
func shows(leaf *x509.Certificate, wanted map[string]string) bool {
	for kind, name := range wanted {
		found := false
		switch kind {
		case "subject":
			found = leaf.Subject.CommonName != "" && pattern(name).match(leaf.Subject.CommonName)
		case "uri":
			for _, u := range leaf.URIs {
				found = found || pattern(name).match(u.String())
			}
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

// maxToken is the most bytes of a header that are looked at.
const maxToken = 16 << 10

// bearer returns the caller of a token.
func (r *Rules) bearer(header string) (*caller, error) {
	scheme, token, _ := strings.Cut(header, " ")
	token = strings.TrimSpace(token)
	if !strings.EqualFold(scheme, "Bearer") || token == "" || len(token) > maxToken {
		return nil, unauthenticated("the header authorization is not Bearer TOKEN, with a token of at most %d bytes", maxToken)
	}
	sum := sha256.Sum256([]byte(token))
	var found *caller
	for _, c := range r.callers {
		for i := range c.tokens {
			// Neither which byte differs nor whose token it is takes another time.
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
