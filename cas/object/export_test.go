// SPDX-License-Identifier: Apache-2.0

package object

import (
	"context"
	"net/http"

	"github.com/cloister-build/cloister/cas"
)

// NewOver is New with requests that next answers.
func NewOver(ctx context.Context, cfg Config, next http.RoundTripper) (*Client, error) {
	c, err := connect(ctx, cfg, next)
	if err == nil {
		c.health.Start()
	}
	return c, err
}

// MaxDamaged is maxDamaged.
const MaxDamaged = maxDamaged

// SetDamaged is setDamaged.
func (s *Store) SetDamaged(d cas.Digest) { s.setDamaged(d, true) }

// Damaged returns the number of blobs that are known to be damaged.
func (c *Client) Damaged() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.damaged)
}
