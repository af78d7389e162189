// SPDX-License-Identifier: Apache-2.0

//go:build linux

package namespace

// KillZygote kills the zygote behind the backend's back.
func (b *Backend) KillZygote() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.proc.Kill()
}
