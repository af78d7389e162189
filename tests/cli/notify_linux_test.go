// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
)

// TestServeNotifiesItsServiceManager checks the notifications of readiness, watchdog and stop.
func TestServeNotifiesItsServiceManager(t *testing.T) {
	name := filepath.Join(t.TempDir(), "notify")
	manager := must.Get(net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"}))(t)
	defer manager.Close()
	hear := func(want string) {
		t.Helper()
		must.Succeed(t, manager.SetReadDeadline(time.Now().Add(time.Minute)))
		for b := make([]byte, 4096); ; {
			n, err := manager.Read(b)
			must.Be(t, err == nil, "got no %q: %v", want, err)
			if strings.HasPrefix(string(b[:n]), want) {
				return
			}
		}
	}
	confined(t)
	dir := t.TempDir()
	s := must.Get(bazelrun.StartServer(t.Context(), bazelrun.ServerConfig{
		Binary: built.Path(t), Dir: filepath.Join(dir, "store"), Home: dir, Listen: "127.0.0.1:0",
		Env: []string{"NOTIFY_SOCKET=" + name, "WATCHDOG_USEC=20000"},
	}))(t)
	hear("READY=1")
	hear("WATCHDOG=1\nSTATUS=0 running, 0 queued, 0 done, ")
	stopped := make(chan error, 1)
	go func() { stopped <- s.Stop() }() // the server waits while the socket is full
	hear("STOPPING=1")
	must.Succeed(t, manager.SetReadDeadline(time.Time{}))
	go func() { _, _ = io.Copy(io.Discard, manager) }()
	must.Succeed(t, <-stopped)
}
