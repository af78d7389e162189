// SPDX-License-Identifier: Apache-2.0

package notify_test

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/notify"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// A manager is the other end of the socket.
type manager struct {
	t    *testing.T
	conn *net.UnixConn
}

// listen starts a manager at a path, or at an abstract name if it begins with @.
func listen(t *testing.T, name string) *manager {
	t.Helper()
	conn := must.Get(net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"}))(t)
	t.Cleanup(func() { conn.Close() })
	t.Setenv("NOTIFY_SOCKET", name)
	t.Setenv("WATCHDOG_USEC", "")
	t.Setenv("WATCHDOG_PID", "")
	return &manager{t, conn}
}

// next returns the next message.
func (m *manager) next() string {
	m.t.Helper()
	b := make([]byte, 4096)
	return string(b[:must.Get(m.conn.Read(b))(m.t)])
}

func (m *manager) ready(check func() (string, error)) *notify.Service {
	m.t.Helper()
	s := must.Get(notify.Ready(notify.Config{Check: check, Log: slog.New(slog.NewTextHandler(io.Discard, nil))}))(m.t)
	return s
}

func (m *manager) expect(want string) {
	m.t.Helper()
	if got := m.next(); got != want {
		m.t.Fatalf("got %q, want %q", got, want)
	}
}

func idle() (string, error) { return "0 running\n0 queued", nil }

func TestNotifyLifecycle(t *testing.T) {
	for _, name := range []string{filepath.Join(t.TempDir(), "s"), "@cloister-notify-test-" + strconv.Itoa(os.Getpid())} {
		m := listen(t, name)
		t.Setenv("WATCHDOG_USEC", "20000")
		t.Setenv("WATCHDOG_PID", strconv.Itoa(os.Getpid()))
		s := m.ready(idle)
		m.expect("READY=1")
		for range 3 {
			m.expect("WATCHDOG=1\nSTATUS=0 running 0 queued")
		}
		s.Stopping()
		for got := ""; got != "STOPPING=1\nSTATUS=draining"; got = m.next() {
		}
		for got := ""; got != "WATCHDOG=1\nSTATUS=draining: 0 running 0 queued"; got = m.next() {
		}
		s.Close()
	}
}

// TestWatchdogNeedsSuccessfulCheck: a stuck or failing server sends no sign of life.
func TestWatchdogNeedsSuccessfulCheck(t *testing.T) {
	m := listen(t, filepath.Join(t.TempDir(), "s"))
	t.Setenv("WATCHDOG_USEC", "2000")
	release := make(chan struct{})
	var calls int
	s := m.ready(func() (string, error) {
		switch calls++; calls {
		case 1:
			return "", errors.New("the store\nis gone")
		case 2:
			<-release // stuck
		}
		return "well", nil
	})
	m.expect("READY=1")
	m.expect("STATUS=cannot serve requests: the store is gone")
	// Many intervals pass while the check is stuck.
	time.Sleep(50 * time.Millisecond)
	must.Succeed(t, m.conn.SetReadDeadline(time.Now()))
	if n, err := m.conn.Read(make([]byte, 100)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("while the check was stuck: %d bytes, %v", n, err)
	}
	must.Succeed(t, m.conn.SetReadDeadline(time.Time{}))
	close(release)
	m.expect("WATCHDOG=1\nSTATUS=well")
	s.Close()
}

func TestWatchdogIsForThisProcess(t *testing.T) {
	for name, env := range map[string]map[string]string{
		"of nobody":          {},
		"of another process": {"WATCHDOG_USEC": "20000", "WATCHDOG_PID": "1"},
	} {
		t.Run(name, func(t *testing.T) {
			m := listen(t, filepath.Join(t.TempDir(), "s"))
			for k, v := range env {
				t.Setenv(k, v)
			}
			s := m.ready(idle)
			defer s.Close()
			m.expect("READY=1")
			m.expect("STATUS=0 running 0 queued")
		})
	}
}

func TestNotifyWithoutManager(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	s, err := notify.Ready(notify.Config{Check: func() (string, error) { t.Error("checked for nobody"); return "", nil }})
	must.Be(t, s == nil && err == nil, "got %v, %v", s, err)
	s.Stopping()
	s.Close()
}

func TestNotifyRejectsInvalidEnvironment(t *testing.T) {
	dir := t.TempDir()
	there := filepath.Join(dir, "s")
	listen(t, there)
	for _, c := range []struct{ name, socket, usec, want string }{
		{"another protocol", "vsock:2:1234", "", "NOTIFY_SOCKET"},
		{"nobody listens", filepath.Join(dir, "none"), "", "reach the service manager"},
		{"no number", there, "soon", "WATCHDOG_USEC"},
		{"no time", there, "0", "WATCHDOG_USEC"},
		{"too long", there, "9223372036854775807", "WATCHDOG_USEC"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("NOTIFY_SOCKET", c.socket)
			t.Setenv("WATCHDOG_USEC", c.usec)
			s, err := notify.Ready(notify.Config{Check: idle})
			expect.That(t, s == nil && err != nil && strings.Contains(err.Error(), c.want),
				"got %v, %v, want an error with %q", s, err, c.want)
		})
	}
}
