// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
)

func TestShowsPathIsByWholeNames(t *testing.T) {
	for _, c := range []struct {
		mounts string
		want   bool
	}{
		{"36 35 8:1 /var/cl /in/0 ro - ext4 /dev/vda ro", true},
		{"36 35 8:1 /var/cl/files/a /in/0 ro - ext4 /dev/vda ro", true},
		{"36 35 0:9 / / rw - overlay x ro,lowerdir=/var/cl:/y", true},
		{"36 35 8:1 /var/cloister /bin/cloister ro - ext4 /dev/vda ro", false},
		{"36 35 8:1 /srv/var/cl /in/0 ro - ext4 /dev/vda ro", false},
	} {
		expect.Equal(t, showsPath(c.mounts, "/var/cl"), c.want, "%q", c.mounts)
	}
	expect.That(t, showsPath(`36 35 8:1 /my\040store /in/0 ro - ext4 /dev/vda ro`, "/my store"),
		"a path with a space is not found")
}
