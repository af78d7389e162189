// SPDX-License-Identifier: Apache-2.0

package object_test

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/object"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// secure starts a server with TLS and a trusted certificate.
func secure(t *testing.T, scheme string) *server {
	t.Helper()
	s := newServer(t, scheme)
	web := s.listen(t, (*httptest.Server).StartTLS)
	trusted := filepath.Join(t.TempDir(), "trusted.pem")
	certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: web.Certificate().Raw})
	must.Succeed(t, os.WriteFile(trusted, certificate, 0o600))
	s.ca = trusted
	return s
}

// account sets the application default credentials to a service account, with tokens from the handler.
func account(t *testing.T, tokens http.HandlerFunc) {
	t.Helper()
	web := httptest.NewServer(tokens)
	t.Cleanup(web.Close)
	private := must.Get(x509.MarshalPKCS8PrivateKey(must.Get(rsa.GenerateKey(rand.Reader, 2048))(t)))(t)
	file := must.Get(json.Marshal(map[string]string{
		"type": "service_account", "client_email": "farm@example.com", "token_uri": web.URL,
		"private_key": string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})),
	}))(t)
	path := filepath.Join(t.TempDir(), "account.json")
	must.Succeed(t, os.WriteFile(path, file, 0o600))
	t.Setenv("GOOGLE_APPLICATION_CREDENTIALS", path)
}

// TestGoogleTokenRequiresTLS checks that requests share one token with TLS, and have none without.
func TestGoogleTokenRequiresTLS(t *testing.T) {
	var issued atomic.Int32
	account(t, func(w http.ResponseWriter, _ *http.Request) {
		issued.Add(1)
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"access_token": "t0k3n", "token_type": "Bearer", "expires_in": 3600}`)
	})
	s := secure(t, "gs")
	s.token = "t0k3n"
	store := s.instance(t)
	d := put(t, store, []byte("x"))
	if b, err := cas.ReadAll(t.Context(), store, d, 1); err != nil || string(b) != "x" || issued.Load() != 1 {
		t.Errorf("got %q, %v with %d tokens, want 1", b, err, issued.Load())
	}
	plain := serve(t, "gs") // rejects requests with a token
	put(t, plain.instance(t), []byte("x"))
	expect.Equal(t, issued.Load(), 1, "tokens after a request without TLS")
}

// TestGoogleTokenErrors covers a failed token request, one that is cancelled, and missing credentials.
func TestGoogleTokenErrors(t *testing.T) {
	s := secure(t, "gs")
	account(t, func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "invalid_grant \x1b[2J\n", http.StatusBadRequest)
	})
	if _, err := object.Open(t.Context(), object.Config{URL: s.url("")}); !errors.Is(err, cas.ErrUnavailable) ||
		!strings.Contains(err.Error(), "invalid_grant") || strings.ContainsAny(err.Error(), "\x1b\n") {
		t.Errorf("got %q, want ErrUnavailable with the reason in one printable line", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan struct{})
	var left atomic.Bool
	account(t, func(_ http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body) // so that the server notices the disconnect
		cancel()
		select {
		case <-over:
		case <-r.Context().Done():
			left.Store(true)
		}
	})
	expect.Error(t, expect.Err(object.Open(ctx, object.Config{URL: s.url("")})), context.Canceled)
	expect.That(t, !left.Load(), "the call waited for the end of the token request")
	close(over)
	t.Setenv("GOOGLE_APPLICATION_CREDENTIALS", filepath.Join(t.TempDir(), "none.json"))
	expect.Message(t, expect.Err(object.Open(t.Context(), object.Config{URL: s.url("")})),
		"gcloud auth application-default login", "no account")
}

func TestTLSRequiresTrustedCertificate(t *testing.T) {
	s := secure(t, "s3")
	put(t, s.instance(t), []byte("x"))
	s.address = strings.Replace(s.address, "127.0.0.1", "localhost", 1) // not in the certificate
	if _, err := object.Open(t.Context(), object.Config{URL: s.url("")}); !errors.Is(err, cas.ErrUnavailable) ||
		!strings.Contains(err.Error(), "certificate") {
		t.Errorf("got %v, want ErrUnavailable and the certificate", err)
	}
}

// TestAuthoritiesOfTheURL checks that ca= replaces the authorities of the host, and that none of them is skipped.
func TestAuthoritiesOfTheURL(t *testing.T) {
	s := secure(t, "s3")
	good := must.Get(os.ReadFile(s.ca))(t)
	key := must.Get(rsa.GenerateKey(rand.Reader, 2048))(t)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der := must.Get(x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key))(t)
	other := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	for name, c := range map[string]struct {
		ca   string
		want error
		text string
	}{
		"the server's":            {string(good), nil, ""},
		"another":                 {string(other), cas.ErrUnavailable, "certificate"},
		"both":                    {string(other) + string(good), nil, ""},
		"the server's, and a cut": {string(good) + string(other[:len(other)/2]), object.ErrURL, "1 of 2 certificates are damaged"},
	} {
		must.Succeed(t, os.WriteFile(s.ca, []byte(c.ca), 0o600))
		client, err := object.Open(t.Context(), object.Config{URL: s.url("")})
		if !errors.Is(err, c.want) || err != nil && !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: got %v, want %v with %q", name, err, c.want, c.text)
		}
		if err == nil {
			must.Succeed(t, client.Close())
		}
	}
}

// TestAmazonCredentials checks the order of credentials: environment, profile, role. Without any, no request is sent.
func TestAmazonCredentials(t *testing.T) {
	s := serve(t, "s3")
	profile := filepath.Join(t.TempDir(), "credentials")
	must.Succeed(t, os.WriteFile(profile,
		[]byte("[default]\naws_access_key_id = "+accessKey+"\naws_secret_access_key = x\n"+
			"[other]\naws_access_key_id = OTHER\naws_secret_access_key = x\n"), 0o600))
	var silent atomic.Bool
	role := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if silent.Load() {
			http.Error(w, "no role", http.StatusNotFound)
			return
		}
		io.WriteString(w, `{"AccessKeyId": "`+accessKey+`", "SecretAccessKey": "x", "Token": "t", "Expiration": "2099-01-01T00:00:00Z"}`)
	}))
	defer role.Close()
	t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", role.URL)
	t.Setenv("HOME", t.TempDir())
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", profile)
	open := func() error {
		_, err := object.Open(t.Context(), object.Config{URL: s.url("")})
		return err
	}
	t.Setenv("AWS_PROFILE", "other")
	expect.Error(t, open(), nil, "environment")
	t.Setenv("AWS_ACCESS_KEY_ID", "")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "")
	if err := open(); !errors.Is(err, os.ErrPermission) || !strings.Contains(err.Error(), "Credential=OTHER") {
		t.Errorf("another profile: got %v, want os.ErrPermission", err)
	}
	t.Setenv("AWS_PROFILE", "")
	expect.Error(t, open(), nil, "profile")
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", filepath.Join(t.TempDir(), "none"))
	expect.Error(t, open(), nil, "role")
	silent.Store(true)
	s.spoil(faults{})
	if err := open(); !errors.Is(err, cas.ErrUnavailable) || !strings.Contains(err.Error(), "set AWS_ACCESS_KEY_ID") ||
		s.called("GET") != 0 {
		t.Errorf("none: got %v after %d requests, want advice after none", err, s.called("GET"))
	}
}
