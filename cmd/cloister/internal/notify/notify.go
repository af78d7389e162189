// SPDX-License-Identifier: Apache-2.0

// Package notify reports to a service manager, by the protocol of sd_notify(3), when a server is ready, what it is
// doing, that it is about to stop, and periodically that it is alive.
//
//	service, err := notify.Ready(notify.Config{Check: check, Log: log}) // once everything answers
//	defer service.Close()
//	service.Stopping() // before it drains
//
// Without a manager, that is without NOTIFY_SOCKET, these calls do nothing.
package notify

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// defaultInterval is the interval of status messages if the manager does not expect watchdog messages more often.
const defaultInterval = 10 * time.Second

// Config configures a Service.
type Config struct {
	// Check returns a line about what the server is doing, or an error if it cannot serve requests. It must take the
	// same path as a request: while it blocks or fails, no watchdog message is sent, and the manager ends the process.
	// A server that only takes no more work is alive.
	Check func() (status string, err error)
	// Log receives failed checks and messages that could not be sent.
	Log *slog.Logger
}

// A Service reports the state of a server that is ready. Its methods are safe for concurrent use, and do nothing on a
// nil Service, which has no manager.
type Service struct {
	config   Config
	interval time.Duration
	watchdog bool // the manager expects watchdog messages
	stop     chan struct{}
	ended    chan struct{}

	mu       sync.Mutex
	stopping bool // guarded by mu
}

// Ready reports to the manager that the server is ready, and from then on what its check returns. It returns nil
// without a manager, and an error if the manager's settings are invalid or it cannot be reached. The caller closes the
// Service.
func Ready(c Config) (*Service, error) {
	watchdog, err := daemon.SdWatchdogEnabled(false)
	if err == nil && watchdog < 0 {
		err = errors.New("too large")
	}
	if err != nil {
		return nil, fmt.Errorf("WATCHDOG_USEC: %w", err)
	}
	sent, err := daemon.SdNotify(false, daemon.SdNotifyReady)
	if err != nil {
		return nil, fmt.Errorf("reach the service manager at NOTIFY_SOCKET: %w", err)
	}
	if !sent {
		return nil, nil
	}
	s := &Service{config: c, interval: defaultInterval, watchdog: watchdog > 0, stop: make(chan struct{}), ended: make(chan struct{})}
	if s.watchdog {
		s.interval = min(watchdog/2, defaultInterval) // half, as sd_watchdog_enabled(3) advises
	}
	go s.watch()
	return s, nil
}

// watch sends messages until the Service is closed.
func (s *Service) watch() {
	defer close(s.ended)
	tick := time.NewTicker(s.interval)
	defer tick.Stop()
	for {
		s.beat()
		select {
		case <-s.stop:
			return
		case <-tick.C:
		}
	}
}

// beat sends the status, with a watchdog message if the check succeeds.
func (s *Service) beat() {
	status, err := s.config.Check()
	var lines []string
	if err != nil {
		s.config.Log.Error("the server cannot serve requests", "err", err)
		status = "cannot serve requests: " + err.Error()
	} else if s.watchdog {
		lines = append(lines, daemon.SdNotifyWatchdog)
	}
	s.mu.Lock()
	if s.stopping {
		status = "draining: " + status
	}
	s.mu.Unlock()
	// A line break in the status would begin another message.
	s.send(append(lines, "STATUS="+strings.Join(strings.Fields(status), " "))...)
}

// Stopping reports to the manager that the server takes no more work and will end. Watchdog messages continue until
// Close.
func (s *Service) Stopping() {
	if s == nil {
		return
	}
	s.mu.Lock()
	s.stopping = true
	s.mu.Unlock()
	s.send(daemon.SdNotifyStopping, "STATUS=draining")
}

// Close ends the messages. It waits for a running check.
func (s *Service) Close() {
	if s == nil {
		return
	}
	close(s.stop)
	<-s.ended
}

func (s *Service) send(lines ...string) {
	if _, err := daemon.SdNotify(false, strings.Join(lines, "\n")); err != nil {
		s.config.Log.Warn("cannot reach the service manager", "err", err)
	}
}
