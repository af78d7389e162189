// SPDX-License-Identifier: Apache-2.0

//go:build linux && !amd64

package monitor

// stubCode is empty: on arm64 no program makes a system call before it may ask the vDSO.
var stubCode map[string]struct {
	random bool
	code   []byte
}
