// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// An oomScore adjusts which process the kernel kills first when memory runs out (proc_pid_oom_score_adj(5)). A slot may
// be larger than the processes of its run, but the kernel must kill these first.
type oomScore struct {
	fd        int
	slot, run string
}

// newOOMScore lowers the score of this process. Without the privilege to do so, it chooses a higher score for runs
// instead.
func newOOMScore(proc int) (*oomScore, error) {
	fd, err := unix.Openat(proc, "self/oom_score_adj", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("oom_score_adj: %w", err)
	}
	var text [16]byte
	n, err := unix.Read(fd, text[:])
	if err != nil {
		return nil, fmt.Errorf("oom_score_adj: %w", err)
	}
	score, err := strconv.Atoi(strings.TrimSpace(string(text[:n])))
	if err != nil {
		return nil, fmt.Errorf("oom_score_adj: %w", err)
	}
	o := &oomScore{fd: fd, slot: "-999", run: strconv.Itoa(score)}
	if o.set(o.slot) != nil {
		o.slot, o.run = o.run, strconv.Itoa(min(score+500, 1000))
	}
	return o, nil
}

// set sets the score of this process. Forks inherit it.
func (o *oomScore) set(score string) error {
	if _, err := unix.Pwrite(o.fd, []byte(score), 0); err != nil {
		return fmt.Errorf("set oom_score_adj to %s: %w", score, err)
	}
	return nil
}
