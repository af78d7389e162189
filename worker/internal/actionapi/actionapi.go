// SPDX-License-Identifier: Apache-2.0

// Package actionapi connects the stages of an action with the remote APIs that the action can call. It describes the
// client that requested the action, the endpoint, and what was fetched; package nested implements the protocol.
package actionapi

import (
	"context"
	"net"

	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// MaxDepth is the maximum nesting depth. Actions of clients have depth 0, and actions that an action of depth N
// executes have depth N+1. Actions of MaxDepth cannot call remote APIs, so they never wait for others.
const MaxDepth = 2

// A Caller identifies who requested an action, so that the calls of the action have the same rights. It is immutable. A
// nil Caller is a client whose identity is unknown.
type Caller struct {
	// Identity has the peer and the headers that authenticate the client of the outermost action. It is never cancelled.
	Identity context.Context
	// Address is the address of that client.
	Address net.Addr
	// Depth is the depth of the requested action.
	Depth int
}

// Nesting returns the depth of the requested action.
func (c *Caller) Nesting() int {
	if c == nil {
		return 0
	}
	return c.Depth
}

// Bare returns c without the identity, which is only kept for actions that call remote APIs.
func (c *Caller) Bare() *Caller {
	if c.Nesting() == 0 {
		return nil
	}
	return &Caller{Depth: c.Depth}
}

// An Action is a running action that calls remote APIs.
type Action struct {
	Caller *Caller
	// Instance is the only one that the action can use.
	Instance string
	// Invocation is the build to which its calls belong, or "".
	Invocation string
}

// An Endpoint serves the remote APIs to actions. It is safe for concurrent use.
type Endpoint interface {
	// Serve takes over l and serves a on its connections until the Session is closed.
	Serve(a Action, l net.Listener) Session
}

// A Session serves one action.
type Session interface {
	// Close ends every call of the action and waits for it, cancels the executions, which may take a while to end, and
	// returns what the action did. Further calls return the same.
	Close() Use
}

// A Use is what an action did with remote APIs.
type Use struct {
	// Calls counts the calls.
	Calls int
	// Fetched are the blobs and results that it fetched, without duplicates, in no order.
	Fetched []manifest.Fetched
}
