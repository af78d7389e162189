// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/cloister-build/cloister/cmd/cloister/internal/notify"
	"github.com/cloister-build/cloister/worker/queue"
)

// tellManager tells the service manager, where there is one, that this node is ready, and until it is closed that it
// lives. Status says what it is doing, and takes the locks that a request takes: where one is not given back, it does not
// return, and no sign of life is given. A node that is full, or whose upstream is away, lives; a new start would not help
// it. The caller calls n.service.Stopping before it drains.
func (n *node) tellManager(status func() string) (err error) {
	n.service, err = notify.Ready(notify.Config{Log: n.log, Check: func() (string, error) {
		return fmt.Sprintf("%s, %d bytes stored", status(), n.store.Stats().Bytes), nil
	}})
	if err != nil {
		return newExit(exitEnvironment, err)
	}
	return nil
}

// statusOf returns what a queue is doing.
func statusOf(work *queue.Queue) func() string {
	return func() string {
		s := work.Stats()
		return fmt.Sprintf("%d running, %d queued, %d done", s.Running, s.Queued, s.Done)
	}
}
