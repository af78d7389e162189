// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"

	"github.com/cloister-build/cloister/cmd/cloister/internal/notify"
	"github.com/cloister-build/cloister/cmd/internal/exit"
)

// NotifyReady tells the service manager, where there is one, that this node is ready, and until it is closed that it
// lives. Status says what it is doing, and takes the locks that a request takes: where one is not given back, it does not
// return, and no sign of life is given. A node that is full, or whose upstream is away, lives; a new start would not help
// it. The caller calls n.service.Stopping before it drains.
func (n *Node) NotifyReady(status func() string) (err error) {
	n.Service, err = notify.Ready(notify.Config{Log: n.Log, Check: func() (string, error) {
		return fmt.Sprintf("%s, %d bytes stored", status(), n.Store.Stats().Bytes), nil
	}})
	if err != nil {
		return exit.New(exit.Environment, err)
	}
	return nil
}
