// SPDX-License-Identifier: Apache-2.0

package access

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
)

// A Pair is a certificate with its key in two files, read again when one of them has changed. It is safe for concurrent
// use.
type Pair struct {
	cert, key string
	log       *slog.Logger

	mu     sync.Mutex
	at     [2]stamp         // guarded by mu; of the files as they were read last
	loaded *tls.Certificate // guarded by mu
	told   string           // guarded by mu; why the files could not be read again, "" if they could
}

// A stamp is by what it is seen that a file has changed: a time and a size, and which file it is, since what unpacks or
// copies files may give another one of the same size the same time.
type stamp struct{ info os.FileInfo }

// stampOf returns that of a file, zero where there is none.
func stampOf(file string) stamp {
	info, err := os.Stat(file)
	if err != nil {
		return stamp{}
	}
	return stamp{info}
}

// is reports whether two stamps are of one file that has not changed, or both of none.
func (s stamp) is(other stamp) bool {
	if s.info == nil || other.info == nil {
		return s.info == other.info
	}
	return os.SameFile(s.info, other.info) && s.info.ModTime().Equal(other.info.ModTime()) && s.info.Size() == other.info.Size()
}

// NewPair reads a certificate, with those between it and one that others trust, and its key, both PEM. When they have
// changed and cannot be read, or do not go together, log is told, and what was read last stays in use.
func NewPair(cert, key string, log *slog.Logger) (*Pair, error) {
	p := &Pair{cert: cert, key: key, log: log}
	at, err := p.stamps()
	if err == nil {
		p.at = at
		p.loaded, err = load(cert, key)
	}
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

func (p *Pair) stamps() (at [2]stamp, err error) {
	for i, name := range []string{p.cert, p.key} {
		info, err := os.Stat(name)
		if err != nil {
			return at, err
		}
		at[i] = stamp{info}
	}
	return at, nil
}

// current returns the pair as it is in the files.
func (p *Pair) current() *tls.Certificate {
	p.mu.Lock()
	defer p.mu.Unlock()
	at, err := p.stamps()
	if err == nil && at[0].is(p.at[0]) && at[1].is(p.at[1]) {
		return p.loaded
	}
	var fresh *tls.Certificate
	if err == nil {
		fresh, err = load(p.cert, p.key)
	}
	if err != nil {
		if why := err.Error(); why != p.told { // once, and not for each connection
			p.told = why
			p.log.Warn("the certificate cannot be read again, and stays as it was", "err", err)
		}
		return p.loaded
	}
	p.loaded, p.at, p.told = fresh, at, ""
	return fresh
}

// Server returns the configuration of a server that has the pair. With clients, a file of PEM, certificates of clients
// are verified by those in it, and demanded if there is to be no other credential.
func (p *Pair) Server(clients string, demanded bool) (*tls.Config, error) {
	c := &tls.Config{
		MinVersion:     tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return p.current(), nil },
	}
	if clients != "" {
		pool, err := ReadPool(clients)
		if err != nil {
			return nil, err
		}
		c.ClientCAs, c.ClientAuth = pool, tls.VerifyClientCertIfGiven
		if demanded {
			c.ClientAuth = tls.RequireAndVerifyClientCert
		}
	}
	return c, nil
}

// Client has a client show the pair to servers that ask for a certificate.
func (p *Pair) Client(c *tls.Config) {
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return p.current(), nil }
}

// ReadPool reads the certificates of those who are trusted to sign others, PEM.
func ReadPool(file string) (*x509.CertPool, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, errors.New(file + ": there is no certificate in it; it takes PEM")
	}
	return pool, nil
}
