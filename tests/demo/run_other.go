// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

import (
	"errors"
	"io"
)

func run([]string, io.Writer) error {
	return errors.New("this version of Cloister executes actions on Linux only")
}
