// SPDX-License-Identifier: Apache-2.0

// Package pulls passes the pull of a container image from the action that waits for it to the code that shows it to
// clients.
package pulls

import (
	"context"

	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
)

// A State returns the current state of a pull, or nil while the image is not being pulled. It is safe for concurrent
// use.
type State = func() *cloisterpb.ImagePull

type key struct{}

// Watch returns a context whose action calls report with a State when it starts to wait for an image, and with nil when
// it has the image or has failed.
func Watch(ctx context.Context, report func(State)) context.Context {
	return context.WithValue(ctx, key{}, report)
}

// Begin reports that the action of ctx waits for an image, until end is called.
func Begin(ctx context.Context, s State) (end func()) {
	report, ok := ctx.Value(key{}).(func(State))
	if !ok {
		return func() {}
	}
	report(s)
	return func() { report(nil) }
}
