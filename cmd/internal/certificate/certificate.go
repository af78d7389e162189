// SPDX-License-Identifier: Apache-2.0

// Package certificate loads TLS certificates and authorities from PEM files, and reloads a certificate when its files
// change.
package certificate

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"github.com/cloister-build/cloister/cmd/internal/filestate"
)

// A Pair is a certificate and its key in two files, reloaded when either file changes. It is safe for concurrent use.
type Pair struct {
	cert, key string
	log       *slog.Logger

	mu     sync.Mutex
	state  [2]filestate.State // guarded by mu; of the files when they were last read
	loaded *tls.Certificate   // guarded by mu
	warned string             // guarded by mu; the last logged error, "" if the files are readable
}

// NewPair reads a certificate, followed by any intermediate certificates, and its key, both PEM. If a later reload
// fails, the Pair logs a warning and continues to use the certificate that it read last.
func NewPair(cert, key string, log *slog.Logger) (*Pair, error) {
	p := &Pair{cert: cert, key: key, log: log}
	p.state = p.states()
	var err error
	p.loaded, err = load(cert, key)
	if err != nil {
		return nil, err
	}
	return p, nil
}

func load(cert, key string) (*tls.Certificate, error) {
	c, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("%s and %s: %w", cert, key, err)
	}
	return &c, nil
}

func (p *Pair) states() [2]filestate.State {
	return [2]filestate.State{filestate.Of(p.cert), filestate.Of(p.key)}
}

// current returns the certificate in the files.
func (p *Pair) current() *tls.Certificate {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.states()
	if now[0].Equal(p.state[0]) && now[1].Equal(p.state[1]) {
		return p.loaded
	}
	fresh, err := load(p.cert, p.key)
	if err != nil {
		if text := err.Error(); text != p.warned { // once, not for every connection
			p.warned = text
			p.log.Warn("cannot reload the certificate; the previous one stays in use", "err", err)
		}
		return p.loaded
	}
	p.loaded, p.state, p.warned = fresh, now, ""
	return fresh
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

// ReadPool reads trusted certificate authorities from a PEM file.
func ReadPool(file string) (*x509.CertPool, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, errors.New(file + ": no certificate found; want PEM")
	}
	return pool, nil
}
