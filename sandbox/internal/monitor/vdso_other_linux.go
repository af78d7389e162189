// SPDX-License-Identifier: Apache-2.0

//go:build linux && !amd64

package monitor

// stubCode is empty: on arm64 no system call precedes a program's first use of the vDSO.
var stubCode map[string]struct {
	random bool
	code   []byte
}
