// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package witness

// Watch returns a Recorder of nothing: only Linux notifies system calls.
func Watch(_ int, v View) *Recorder {
	r := newRecorder(v)
	close(r.done)
	return r
}
