// SPDX-License-Identifier: Apache-2.0

// Package ca issues the credentials of end-to-end tests: certificates of a new authority, and signed tokens.
package ca

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
)

// An Authority signs certificates and tokens, and keeps them as files in a directory. Its methods fail the test on
// errors, which only a broken machine causes.
type Authority struct {
	t    testing.TB
	dir  string
	cert *x509.Certificate
	key  ed25519.PrivateKey
}

// New returns a new authority in dir, which gets its certificate ca.pem and the public key of its tokens, keys.pem.
func New(t testing.TB, dir string) *Authority {
	t.Helper()
	a := &Authority{t: t, dir: dir}
	_, key, err := ed25519.GenerateKey(rand.Reader)
	must.Succeed(t, err)
	a.key = key
	template := &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der := a.issue("authority", template, template, key)
	a.cert = must.Get(x509.ParseCertificate(der))(t)
	a.Write("ca.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	public := must.Get(x509.MarshalPKIXPublicKey(key.Public()))(t)
	a.Write("keys.pem", pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}))
	return a
}

func (a *Authority) issue(name string, template, parent *x509.Certificate, key ed25519.PrivateKey) []byte {
	a.t.Helper()
	serial := must.Get(rand.Int(rand.Reader, big.NewInt(1<<62)))(a.t)
	template.SerialNumber, template.Subject = serial, pkix.Name{CommonName: name}
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	template.IPAddresses = append(template.IPAddresses, net.IPv4(127, 0, 0, 1))
	return must.Get(x509.CreateCertificate(rand.Reader, template, parent, key.Public(), a.key))(a.t)
}

// File returns the path of a file in the directory.
func (a *Authority) File(name string) string { return filepath.Join(a.dir, name) }

// Write writes a file into the directory and returns its path.
func (a *Authority) Write(name string, text []byte) string {
	a.t.Helper()
	must.Succeed(a.t, os.WriteFile(a.File(name), text, 0o600))
	return a.File(name)
}

// Sign writes NAME.pem and NAME.key, a certificate for NAME on 127.0.0.1 and at the addresses.
func (a *Authority) Sign(name string, at ...net.IP) {
	a.t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	must.Succeed(a.t, err)
	der := a.issue(name, &x509.Certificate{IPAddresses: at}, a.cert, key)
	secret := must.Get(x509.MarshalPKCS8PrivateKey(key))(a.t)
	a.Write(name+".pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	a.Write(name+".key", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}))
}

// Token returns a JSON Web Token with the claims.
func (a *Authority) Token(claims map[string]any) string {
	a.t.Helper()
	encode := base64.RawURLEncoding.EncodeToString
	body := must.Get(json.Marshal(claims))(a.t)
	signed := encode([]byte(`{"alg":"EdDSA","typ":"JWT"}`)) + "." + encode(body)
	return signed + "." + encode(ed25519.Sign(a.key, []byte(signed)))
}

// Dial connects to a server whose certificate the authority has signed, with the certificate NAME and the token unless
// they are empty. The connection ends with the test.
func (a *Authority) Dial(address, name, token string) *grpc.ClientConn {
	a.t.Helper()
	config := &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
	config.RootCAs.AddCert(a.cert)
	if name != "" {
		pair := must.Get(tls.LoadX509KeyPair(a.File(name+".pem"), a.File(name+".key")))(a.t)
		config.Certificates = []tls.Certificate{pair}
	}
	options := []grpc.DialOption{grpc.WithTransportCredentials(credentials.NewTLS(config))}
	if token != "" {
		options = append(options, grpc.WithPerRPCCredentials(Bearer(token)))
	}
	conn := must.Get(grpc.NewClient("passthrough:///"+address, options...))(a.t)
	a.t.Cleanup(func() { conn.Close() })
	return conn
}

// A Bearer sends a token, as Bazel's --remote_header does, even on an unencrypted connection, which is local.
type Bearer string

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (b Bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (Bearer) RequireTransportSecurity() bool { return false }
