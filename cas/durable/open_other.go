// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package durable

// nonblock is 0: named pipes are not files here.
const nonblock = 0
