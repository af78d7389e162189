// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"

	"github.com/cloister-build/cloister/cas"
)

// Fetch brings all files of l near, as Stage does, where store is a cas.Fetcher. One that is absent is no error: Stage
// will say so.
func (l *Layout) Fetch(ctx context.Context, store cas.Store) error {
	if _, ok := cas.As[cas.Fetcher](store); !ok {
		return nil
	}
	return cas.Fetch(ctx, store, l.contents(false))
}
