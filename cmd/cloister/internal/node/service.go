// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"

	"github.com/cloister-build/cloister/cmd/cloister/internal/notify"
	"github.com/cloister-build/cloister/cmd/internal/exit"
)

// NotifyReady reports to the service manager, if there is one, that this node is ready, and then that it is alive until
// Close. status takes the locks that a request takes, so that a deadlock ends the watchdog messages. A node that is
// full or whose upstream is down is alive, since a restart would not help. The caller calls n.Service.Stopping before
// it drains.
func (n *Node) NotifyReady(status func() string) (err error) {
	n.Service, err = notify.Ready(notify.Config{Log: n.Log, Check: func() (string, error) {
		return fmt.Sprintf("%s, %d bytes stored", status(), n.Store.Stats().Bytes), nil
	}})
	if err != nil {
		return exit.New(exit.Environment, err)
	}
	return nil
}
