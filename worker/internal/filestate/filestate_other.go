// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package filestate

import (
	"os"
	"time"
)

// changeTime returns the zero time: this system's is not read.
func changeTime(os.FileInfo) time.Time { return time.Time{} }
