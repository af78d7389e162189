// SPDX-License-Identifier: Apache-2.0

// Package notify tells a service manager how a server does, by the protocol of sd_notify(3): when it is ready, what it is
// doing, that it is about to stop, and at intervals that it is alive. It decides nothing: who waits for the server, and
// what becomes of one that is silent, is the manager's.
//
// A command of three lines has all of it:
//
//	service, err := notify.Ready(notify.Config{Check: check, Log: log}) // once everything answers
//	defer service.Close()
//	service.Stopping() // before it drains
//
// Where no manager asks, which is where NOTIFY_SOCKET is not set, none of them does anything.
package notify

import (
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// DefaultEvery is how often a manager is told the status if it does not ask for a sign of life more often.
const DefaultEvery = 10 * time.Second

// Config says what a manager is told.
type Config struct {
	// Check returns a line about what the server is doing, or an error if it could not serve anybody. It must go
	// through what a request goes through: while it does not return, or returns errors, no sign of life is given, and
	// the manager ends the process. A server that merely takes no work just now is alive.
	Check func() (status string, err error)
	// Log is told of checks that failed, and of messages that were not sent.
	Log *slog.Logger
	// Getenv looks up what the manager asks for; nil is os.Getenv.
	Getenv func(string) string
}

// A Service is a server that has told its manager that it is ready. Its methods may be called concurrently, and on a nil
// Service, which has no manager.
type Service struct {
	config Config
	conn   *net.UnixConn
	every  time.Duration
	alive  bool // the manager asks for signs of life
	stop   chan struct{}
	ended  chan struct{}

	mu       sync.Mutex
	stopping bool // guarded by mu
}

// Ready tells the manager that the server is ready, and from then on what its check says. It returns nil if there is no
// manager, and an error if what it asks for makes no sense or it cannot be reached. The caller closes the Service.
func Ready(c Config) (*Service, error) {
	if c.Getenv == nil {
		c.Getenv = os.Getenv
	}
	address := c.Getenv("NOTIFY_SOCKET")
	if address == "" {
		return nil, nil
	}
	if !strings.HasPrefix(address, "/") && !strings.HasPrefix(address, "@") {
		return nil, fmt.Errorf("NOTIFY_SOCKET=%s: not the path of a socket, nor an abstract one, which begins with @", address)
	}
	every, alive, err := interval(c.Getenv)
	if err != nil {
		return nil, err
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: address, Net: "unixgram"})
	if err != nil {
		return nil, fmt.Errorf("reach the service manager at NOTIFY_SOCKET: %w", err)
	}
	s := &Service{config: c, conn: conn, every: every, alive: alive, stop: make(chan struct{}), ended: make(chan struct{})}
	if err := s.send("READY=1"); err != nil {
		conn.Close()
		return nil, fmt.Errorf("tell the service manager: %w", err)
	}
	go s.watch()
	return s, nil
}

// interval returns how often the manager wants to hear something, and whether it is for a sign of life. It is half the
// time after which it would end this process, as sd_watchdog_enabled(3) advises.
func interval(getenv func(string) string) (every time.Duration, alive bool, err error) {
	text := getenv("WATCHDOG_USEC")
	if pid := getenv("WATCHDOG_PID"); text == "" || pid != "" && pid != strconv.Itoa(os.Getpid()) {
		return DefaultEvery, false, nil // or it is another process that must give signs
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 1 || n > int64(24*time.Hour/time.Microsecond) {
		return 0, false, fmt.Errorf("WATCHDOG_USEC=%s: not a number of microseconds of at most a day", text)
	}
	return min(time.Duration(n)*time.Microsecond/2, DefaultEvery), true, nil
}

// watch gives signs of life until the Service is closed.
func (s *Service) watch() {
	defer close(s.ended)
	tick := time.NewTicker(s.every)
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

// beat gives one sign of life, if there is one.
func (s *Service) beat() {
	status, err := s.config.Check()
	var lines []string
	if err != nil {
		s.config.Log.Error("this server cannot serve anybody", "err", err)
		status = "cannot serve anybody: " + err.Error()
	} else if s.alive {
		lines = append(lines, "WATCHDOG=1")
	}
	s.mu.Lock()
	if s.stopping {
		status = "draining: " + status
	}
	s.mu.Unlock()
	// One line each: a line break would begin another message.
	lines = append(lines, "STATUS="+strings.Join(strings.Fields(status), " "))
	if err := s.send(lines...); err != nil {
		s.config.Log.Warn("the service manager was not told", "err", err)
	}
}

// Stopping tells the manager that the server takes no more work and will end. Signs of life go on until Close, for it may
// take a while.
func (s *Service) Stopping() {
	if s == nil {
		return
	}
	s.mu.Lock()
	s.stopping = true
	s.mu.Unlock()
	if err := s.send("STOPPING=1", "STATUS=draining"); err != nil {
		s.config.Log.Warn("the service manager was not told", "err", err)
	}
}

// Close ends the signs of life. It waits for a check that is under way.
func (s *Service) Close() {
	if s == nil {
		return
	}
	close(s.stop)
	<-s.ended
	s.conn.Close()
}

// send sends one message, which a datagram carries as a whole or not at all.
func (s *Service) send(lines ...string) error {
	_, err := s.conn.Write([]byte(strings.Join(lines, "\n")))
	return err
}
