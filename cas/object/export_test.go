// SPDX-License-Identifier: Apache-2.0

package object

import (
	"context"
	"net/http"
)

// NewOver is New with requests that next answers.
func NewOver(ctx context.Context, cfg Config, next http.RoundTripper) (*Client, error) {
	c, err := connect(ctx, cfg, next)
	if err == nil {
		c.health.Start()
	}
	return c, err
}
