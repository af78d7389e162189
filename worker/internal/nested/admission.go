// SPDX-License-Identifier: Apache-2.0

package nested

import (
	"context"

	"google.golang.org/grpc/stats"
)

// An admission limits the calls of each session that are in progress. It implements stats.Handler, because interceptors
// come too late: a call begins before its first message is received.
type admission struct{}

// An admitted is whether a call has a permit of its session.
type admitted struct {
	session *session
	ok      bool
}

type admittedKey struct{}

// TagRPC implements stats.Handler.
func (admission) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context {
	return context.WithValue(ctx, admittedKey{}, &admitted{session: sessionOf(ctx)})
}

// HandleRPC implements stats.Handler. One goroutine handles the begin and the end of a call.
func (admission) HandleRPC(ctx context.Context, s stats.RPCStats) {
	switch s.(type) {
	case *stats.Begin:
		a := ctx.Value(admittedKey{}).(*admitted)
		select {
		case a.session.permits <- struct{}{}:
			a.ok = true
		case <-ctx.Done(): // enter refuses it
		}
	case *stats.End:
		if a := ctx.Value(admittedKey{}).(*admitted); a.ok {
			<-a.session.permits
		}
	}
}

// TagConn implements stats.Handler.
func (admission) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements stats.Handler.
func (admission) HandleConn(context.Context, stats.ConnStats) {}
