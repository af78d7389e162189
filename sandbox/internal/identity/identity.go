// SPDX-License-Identifier: Apache-2.0

// Package identity defines the user, host name and files of /etc that runs see with every backend, so that actions
// cannot tell backends apart by them. It mounts nothing.
package identity

import (
	"fmt"
	"slices"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
)

// An Identity is the user and host name of a run.
type Identity struct {
	User, Hostname string
	UID, GID       int
}

// Of returns the identity of a run under these conditions.
func Of(c *sandbox.Conditions) Identity {
	id := Identity{"build", zygote.Hostname, zygote.UID, zygote.GID}
	if c.User != "" {
		id.User, id.UID, id.GID = c.User, int(c.UID), int(c.UID)
	}
	if c.Hostname != "" {
		id.Hostname = c.Hostname
	}
	return id
}

// Hosts returns the operation that makes /etc/hosts; more are additional lines.
func (id Identity) Hosts(more string) zygote.Op {
	text := "127.0.0.1 localhost " + id.Hostname + "\n::1 localhost " + id.Hostname + "\n" + more
	return zygote.Op{Kind: zygote.OpFile, Target: "/etc/hosts", Source: text}
}

// Etc returns the operations that populate /etc; hosts are additional lines of /etc/hosts. The C library looks a name
// up only if it resolves.
func (id Identity) Etc(hosts string, resolves bool) (ops []zygote.Op) {
	files := [][2]string{
		{"passwd", fmt.Sprintf("root:x:0:0:root:/:/bin/sh\n%s:x:%d:%d:%[1]s:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
			id.User, id.UID, id.GID)},
		{"group", fmt.Sprintf("root:x:0:\n%s:x:%d:\nnogroup:x:65534:\n", id.User, id.GID)},
		{"nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"},
	}
	if resolves {
		files[2][1] = "passwd: files\ngroup: files\nhosts: files dns\n"
	}
	for _, f := range files {
		ops = append(ops, zygote.Op{Kind: zygote.OpFile, Target: "/etc/" + f[0], Source: f[1]})
	}
	return slices.Insert(ops, 2, id.Hosts(hosts))
}
