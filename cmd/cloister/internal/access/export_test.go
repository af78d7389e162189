// SPDX-License-Identifier: Apache-2.0

package access

import (
	"context"
	"time"
)

// SetPatience sets how long whoever is not known may take to send a message.
func (r *Rules) SetPatience(d time.Duration) { r.patience = d }

// LookAlways has a file looked at with each call.
func (l *Live) LookAlways() { l.every = 0 }

// First returns the context of a call by the first caller of r.
func First(ctx context.Context, r *Rules) context.Context {
	return context.WithValue(ctx, callerKey{}, r.callers[0])
}
