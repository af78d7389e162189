// SPDX-License-Identifier: Apache-2.0

package access

import (
	"context"
	"log/slog"

	"google.golang.org/grpc"
)

// WorkerOptions is Live.WorkerOptions with rules that never change.
func (r *Rules) WorkerOptions() []grpc.ServerOption {
	return guard{rules: r.always, table: workers}.options()
}

// Look checks the files now.
func (l *Live) Look() { l.look(context.Background()) }

// NewLiveReading is NewLive with another function to read the file.
func NewLiveReading(file string, log *slog.Logger, read func(string) (*Rules, error)) (*Live, error) {
	return newLive(file, func(*Rules) error { return nil }, log, read)
}

// First returns the context of a call by the first caller of r.
func First(ctx context.Context, r *Rules) context.Context {
	return context.WithValue(ctx, callerKey{}, r.callers[0])
}
