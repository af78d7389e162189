// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package ramdir

func available() bool { return false }
