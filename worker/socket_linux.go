// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"errors"
	"fmt"
	"net"
	"os"
)

// listenIn listens on a new socket in a directory, to which every user who can see it can connect. Closing the listener
// does not remove the file.
func listenIn(dir *os.Root, name string) (net.Listener, error) {
	d, err := dir.Open(".")
	if err != nil {
		return nil, err
	}
	defer d.Close()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), name)})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false) // its path is only valid now
	if err := dir.Chmod(name, 0o666); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}
