// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package soak

import (
	"context"
	"errors"
)

func (*Process) measure(context.Context) (map[string]float64, error) {
	return nil, errors.ErrUnsupported
}

// Leftovers returns what a server that has ended left behind.
func (*Process) Leftovers() []string { return nil }
