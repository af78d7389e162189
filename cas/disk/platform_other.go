// SPDX-License-Identifier: Apache-2.0

//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly || windows)

package disk

func isFull(error) bool { return false }

// makePrivate does nothing: the directory keeps its permissions.
func makePrivate(string) error { return nil }
