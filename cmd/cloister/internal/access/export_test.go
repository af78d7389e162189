// SPDX-License-Identifier: Apache-2.0

package access

import (
	"context"
	"time"
)

// SetPatience sets the time limit for a stranger's first message.
func (r *Rules) SetPatience(d time.Duration) { r.patience = d }

// LookAlways makes every call check the file.
func (l *Live) LookAlways() { l.every = 0 }

// First returns the context of a call by the first caller of r.
func First(ctx context.Context, r *Rules) context.Context {
	return context.WithValue(ctx, callerKey{}, r.callers[0])
}
