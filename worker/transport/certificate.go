// SPDX-License-Identifier: Apache-2.0

// Package transport secures gRPC connections with files: TLS certificates and authorities in PEM, and bearer tokens.
// Certificates are reloaded when their files change, and tokens are reread for each call.
package transport

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/cloister-build/cloister/worker/internal/filestate"
	"github.com/cloister-build/cloister/worker/internal/pemblocks"
)

// A Pair is a certificate and its key in two files, reloaded when either file changes. Use NewPair; the zero
// Pair is not usable. It is safe for concurrent use.
type Pair struct {
	cert, key string
	log       *slog.Logger
	load      func(cert, key string) (*tls.Certificate, error) // load, except in tests

	mu     sync.Mutex
	state  [2]filestate.State // guarded by mu; of the files when they were last read
	loaded *tls.Certificate   // guarded by mu
	warned string             // guarded by mu; the last logged error since a certificate was loaded
	stale  error              // guarded by mu; why the files could not be read, nil if loaded is from them
	check  *check             // guarded by mu; the running one, or nil
}

// A check looks for changed files and reads them.
type check struct {
	done chan struct{} // closed when it has ended
	late bool          // guarded by Pair.mu; it takes too long for a handshake to wait
}

const (
	// checkTime is how long a handshake waits for the files, which may be on a network.
	checkTime = time.Second
	// maxPEM is the maximum size in bytes of a certificate or key file.
	maxPEM = 1 << 20
)

// NewPair reads a certificate, followed by any intermediate certificates, and its key, both PEM. If a later reload
// fails or takes more than a second, the Pair logs a warning and continues to use the certificate that it read last; a
// nil log discards it. Stale returns the reason.
func NewPair(cert, key string, log *slog.Logger) (*Pair, error) {
	log = cmp.Or(log, slog.New(slog.DiscardHandler))
	p := &Pair{cert: cert, key: key, log: log, load: load}
	p.state = p.states()
	var err error
	p.loaded, err = load(cert, key)
	if err != nil {
		return nil, err
	}
	return p, nil
}

func load(cert, key string) (*tls.Certificate, error) {
	var texts [2][]byte
	for i, file := range []string{cert, key} {
		var err error
		if texts[i], _, err = filestate.Read(file, maxPEM); err != nil {
			return nil, err
		}
	}
	c, err := tls.X509KeyPair(texts[0], texts[1])
	if err != nil {
		return nil, fmt.Errorf("%s and %s: %w", cert, key, err)
	}
	return &c, nil
}

func (p *Pair) states() [2]filestate.State {
	return [2]filestate.State{filestate.Of(p.cert), filestate.Of(p.key)}
}

// current returns the certificate in the files, or the last one if they cannot be read in time.
func (p *Pair) current() *tls.Certificate {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.check
	if c == nil {
		c = &check{done: make(chan struct{})}
		p.check = c
		go p.reload(c, p.state)
	}
	if c.late {
		return p.loaded
	}
	p.mu.Unlock()
	timeout := time.NewTimer(checkTime)
	defer timeout.Stop()
	select {
	case <-c.done:
	case <-timeout.C:
	}
	p.mu.Lock()
	if p.check == c && !c.late {
		c.late = true
		p.warn(fmt.Errorf("%s or %s does not answer within %v", p.cert, p.key, checkTime))
	}
	return p.loaded
}

// reload loads the files unless they have the state old, and ends c.
func (p *Pair) reload(c *check, old [2]filestate.State) {
	now := p.states()
	same := now[0].Equal(old[0]) && now[1].Equal(old[1])
	var fresh *tls.Certificate
	var err error
	if !same {
		fresh, err = p.load(p.cert, p.key)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case err != nil:
		p.warn(err)
	case !same:
		p.loaded, p.state, p.warned, p.stale = fresh, now, "", nil
	default: // perhaps again, after other versions
		p.stale = nil
	}
	p.check = nil
	close(c.done)
}

// warn logs why the certificate cannot be reloaded, once and not for every connection. The caller holds p.mu.
func (p *Pair) warn(err error) {
	if text := err.Error(); text != p.warned {
		p.warned = text
		p.log.Warn("cannot reload the certificate; the previous one stays in use", "err", err)
	}
	p.stale = err
}

// Stale reads changed files, as the next handshake would, and returns why they could not be read. Until it returns nil,
// the previous certificate is in use. It waits for at most a second.
func (p *Pair) Stale() error {
	p.current()
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stale
}

// Server returns the TLS configuration of a server that presents the pair. If clientCA, a PEM file, is not empty, the
// server verifies client certificates against it; if require is set, it rejects clients without one.
func (p *Pair) Server(clientCA string, require bool) (*tls.Config, error) {
	c := &tls.Config{
		MinVersion:     tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return p.current(), nil },
	}
	if clientCA != "" {
		pool, err := ReadPool(clientCA)
		if err != nil {
			return nil, err
		}
		c.ClientCAs, c.ClientAuth = pool, tls.VerifyClientCertIfGiven
		if require {
			c.ClientAuth = tls.RequireAndVerifyClientCert
		}
	}
	return c, nil
}

// Client configures a client to present the pair to servers that request a certificate.
func (p *Pair) Client(c *tls.Config) {
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return p.current(), nil }
}

// ReadPool reads trusted certificate authorities from a PEM file. A block that is not a certificate is an error:
// skipping it could silently distrust an authority.
func ReadPool(file string) (*x509.CertPool, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	blocks, err := pemblocks.Decode(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	pool := x509.NewCertPool()
	for i, block := range blocks {
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("%s: PEM block %d is %+.40q: want only certificates", file, i+1, block.Type)
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("%s: certificate %d: %w", file, i+1, err)
		}
		pool.AddCert(c)
	}
	if len(blocks) == 0 {
		return nil, errors.New(file + ": no certificate found; want PEM")
	}
	return pool, nil
}
