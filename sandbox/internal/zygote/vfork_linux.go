// SPDX-License-Identifier: Apache-2.0

//go:build amd64 || arm64

package zygote

// vfork is clone(2) of a child that calls becomeCommand, with flags that let it use the caller's stack meanwhile.
//
//go:noescape
func vfork(flags uintptr, l *launch) (pid, errno uintptr)
