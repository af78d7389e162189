// SPDX-License-Identifier: Apache-2.0

//go:build linux && !amd64 && !arm64

package seccomp

// On an architecture without a table every call belongs to another one, so nothing is permitted.
const arch = 0

var names [1]string
