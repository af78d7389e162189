// SPDX-License-Identifier: Apache-2.0

package execserver

import (
	"context"
	"strings"

	"github.com/cloister-build/cloister/worker"
	"google.golang.org/grpc/metadata"
)

// trace returns the trace headers of a call.
func trace(ctx context.Context) map[string]string {
	return worker.ParseTrace(func(name string) string {
		return strings.Join(metadata.ValueFromIncomingContext(ctx, name), ",") // of repeated headers
	})
}
