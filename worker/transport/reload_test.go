// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bytes"
	"crypto/tls"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestHandshakeDoesNotWaitForFiles checks that files that cannot be read in time delay one handshake briefly, and that
// their certificate is used once they were read.
func TestHandshakeDoesNotWaitForFiles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		old, fresh := &tls.Certificate{}, &tls.Certificate{}
		answer := make(chan struct{})
		var log bytes.Buffer
		p := &Pair{
			cert: filepath.Join(dir, "cert"), key: filepath.Join(dir, "key"), loaded: old,
			log: slog.New(slog.NewTextHandler(&log, nil)),
			load: func(string, string) (*tls.Certificate, error) {
				<-answer
				return fresh, nil
			},
		}
		if err := os.WriteFile(p.cert, nil, 0o600); err != nil { // its state has changed
			t.Fatal(err)
		}
		for _, want := range []time.Duration{time.Second, 0, 0} {
			start := time.Now()
			if got := p.current(); got != old || time.Since(start) != want {
				t.Errorf("got another certificate: %v, after %v, want the old one after %v", got != old, time.Since(start), want)
			}
		}
		expect.Equal(t, strings.Count(log.String(), "does not answer within 1s"), 1, "warnings in\n%s", log.String())
		expect.Message(t, p.Stale(), "does not answer within 1s")
		close(answer)
		synctest.Wait()
		expect.Error(t, p.Stale(), nil, "after the files were read")
		expect.That(t, p.current() == fresh, "got the old certificate, want the one that was read")
	})
}

// TestReturnedFilesAreNotStale checks that once the files that were read last are back, their certificate is the current
// one, and that a repeated mistake is logged once.
func TestReturnedFilesAreNotStale(t *testing.T) {
	dir := t.TempDir()
	mistake := errors.New("a mistake")
	var log bytes.Buffer
	p := &Pair{
		cert: filepath.Join(dir, "cert"), key: filepath.Join(dir, "key"), loaded: &tls.Certificate{},
		log:  slog.New(slog.NewTextHandler(&log, nil)),
		load: func(string, string) (*tls.Certificate, error) { return nil, mistake },
	}
	for range 2 {
		must.Succeed(t, os.WriteFile(p.cert, nil, 0o600))
		expect.Error(t, p.Stale(), mistake, "with another version")
		must.Succeed(t, os.Remove(p.cert))
		expect.Error(t, p.Stale(), nil, "with the version that was read last")
	}
	expect.Equal(t, strings.Count(log.String(), "a mistake"), 1, "warnings in\n%s", log.String())
}
