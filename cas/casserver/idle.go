// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// defaultStreamIdle is the default of Config.StreamIdle.
const defaultStreamIdle = time.Minute

// A watched stream records how long the server has been waiting for its client.
type watched struct {
	grpc.ServerStream
	waiting atomic.Int64 // when the current send or receive began, in Unix nanoseconds; 0 if there is none
	end     chan error   // what ends the call early; capacity 1
}

// SendMsg implements grpc.ServerStream.
func (w *watched) SendMsg(m any) error {
	w.waiting.Store(time.Now().UnixNano())
	defer w.waiting.Store(0)
	return w.ServerStream.SendMsg(m)
}

// RecvMsg implements grpc.ServerStream.
func (w *watched) RecvMsg(m any) error {
	w.waiting.Store(time.Now().UnixNano())
	defer w.waiting.Store(0)
	return w.ServerStream.RecvMsg(m)
}

// silence returns how long the server has been waiting for the client to send or receive a message.
func (w *watched) silence() time.Duration {
	if since := w.waiting.Load(); since != 0 {
		return time.Since(time.Unix(0, since))
	}
	return 0
}

// stop ends the call with err, unless it ends otherwise first.
func (w *watched) stop(err error) {
	select {
	case w.end <- err:
	default:
	}
}

// watch runs handle in a separate goroutine. When the client has been silent for idle, or after stop, it returns
// without waiting for handle: only the end of a call ends a pending send or receive. The first message has arrived.
func (us *uploads) watch(stream grpc.ServerStream, idle time.Duration, handle func(*watched) error) error {
	w := &watched{ServerStream: stream, end: make(chan error, 1)}
	var err error
	var panicked any
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				panicked = fmt.Sprintf("%v\n%s", p, debug.Stack())
			}
		}()
		err = handle(w)
	}()
	timer := time.NewTimer(idle)
	defer timer.Stop()
	for {
		select {
		case <-done:
			if panicked != nil {
				panic(panicked)
			}
			return err
		case <-timer.C:
			silence := w.silence()
			if silence >= idle {
				w.stop(status.Errorf(codes.Unavailable, "the client was silent for %v; retry", idle))
			}
			timer.Reset(max(idle-silence, time.Millisecond))
		case err := <-w.end:
			us.linger(done)
			return err
		}
	}
}
