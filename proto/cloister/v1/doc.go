// SPDX-License-Identifier: Apache-2.0

// Package cloisterpb is the Go code of package cloister.v1: what a worker adds to the metadata of a
// result. It is generated, apart from this comment.
package cloisterpb
