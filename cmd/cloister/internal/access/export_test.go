// SPDX-License-Identifier: Apache-2.0

package access

import (
	"context"
	"time"
)

// SetUnauthenticatedTimeout sets the time limit for the first message of an unauthenticated call.
func (r *Rules) SetUnauthenticatedTimeout(d time.Duration) { r.timeout = d }

// LookAlways makes every call check the file.
func (l *Live) LookAlways() { l.every = 0 }

// First returns the context of a call by the first caller of r.
func First(ctx context.Context, r *Rules) context.Context {
	return context.WithValue(ctx, callerKey{}, r.callers[0])
}
