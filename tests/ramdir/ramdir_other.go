// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package ramdir

import (
	"errors"
	"os"
)

func available() bool { return false }

func create(string) (string, *os.File, error) { return "", nil, errors.ErrUnsupported }
