// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// Credentials are the credentials of a client for one server, and the authorities that verify that server. The zero
// Credentials present nothing and trust the authorities of this host.
type Credentials struct {
	// CA is a PEM file of authorities; "" means those of this host.
	CA string
	// Cert and Key are PEM files of a client certificate and its key; "" means none.
	Cert, Key string
	// Token is a file with a bearer token. If it is "", the environment variable named by TokenVariable has the token;
	// if that is unset, no token is sent.
	Token, TokenVariable string
	// Log receives failures to reload the certificate; nil discards them.
	Log *slog.Logger
}

// A FileError reports that a file of Credentials, or the variable, cannot be used.
type FileError struct {
	Field string // of Credentials: CA, Cert or Token
	Err   error
}

// Error returns the field and the error.
func (e *FileError) Error() string { return "Credentials." + e.Field + ": " + e.Err.Error() }

// Unwrap returns the error.
func (e *FileError) Unwrap() error { return e.Err }

// ErrAddress reports a malformed address of a server.
var ErrAddress = errors.New("invalid server address: write grpc://HOST:PORT or grpcs://HOST:PORT")

// Dial returns a connection to the server at address, grpc://HOST:PORT[/INSTANCE] or grpcs://HOST:PORT[/INSTANCE], and
// the name of the instance there. The server need not be reachable yet. Dial fails with ErrAddress, or if c is
// unusable. The caller closes the connection. Of contradicting options and credentials, the options win.
func Dial(address string, c Credentials, options ...grpc.DialOption) (conn *grpc.ClientConn, instance string, err error) {
	u, err := url.Parse(address)
	if err != nil || u.Port() == "" || u.User != nil || u.Scheme != "grpc" && u.Scheme != "grpcs" {
		return nil, "", ErrAddress
	}
	secure, err := c.DialOptions(address)
	if err != nil {
		return nil, "", err
	}
	standard := []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	conn, err = grpc.NewClient(u.Host, slices.Concat(standard, secure, options)...)
	return conn, strings.Trim(u.Path, "/"), err
}

// DialOptions returns the options to dial a grpc:// or grpcs:// address with c, such as for remote.New. It refuses
// credentials that would have no effect, and tokens that would go to another host in clear text.
func (c Credentials) DialOptions(address string) ([]grpc.DialOption, error) {
	secure := strings.HasPrefix(address, "grpcs://")
	var options []grpc.DialOption
	switch {
	case (c.Cert == "") != (c.Key == ""):
		return nil, errors.New("transport: Credentials.Cert and Key go together")
	case !secure && c.CA+c.Cert != "":
		return nil, errors.New("transport: Credentials.CA and Cert need a server with TLS: write its address as grpcs://HOST:PORT")
	case secure:
		config, err := c.tls()
		if err != nil {
			return nil, err
		}
		options = append(options, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	}
	t := bearer{file: c.Token, variable: c.TokenVariable}
	if text, err := t.read(); err != nil {
		return nil, &FileError{"Token", err}
	} else if text == "" {
		return options, nil
	}
	if !secure && !onLoopback(address) {
		return nil, errors.New("refusing to send a token in clear text: write the address as grpcs://HOST:PORT, or send none")
	}
	return append(options, grpc.WithPerRPCCredentials(&t)), nil
}

func (c Credentials) tls() (*tls.Config, error) {
	config := &tls.Config{}
	if c.CA != "" {
		pool, err := ReadPool(c.CA)
		if err != nil {
			return nil, &FileError{"CA", err}
		}
		config.RootCAs = pool
	}
	if c.Cert != "" {
		pair, err := NewPair(c.Cert, c.Key, c.Log)
		if err != nil {
			return nil, &FileError{"Cert", err}
		}
		pair.Client(config)
	}
	return config, nil
}

// onLoopback reports whether an address is on this host, where nobody can eavesdrop.
func onLoopback(address string) bool {
	u, err := url.Parse(address)
	if err != nil {
		return false
	}
	ip := net.ParseIP(u.Hostname())
	return u.Hostname() == "localhost" || ip != nil && ip.IsLoopback()
}

// A bearer sends a token with each call. It rereads the file each time, because a token may be renewed while a command
// runs.
type bearer struct {
	file     string
	variable string // environment variable, if there is no file
}

// read returns the token, or "" if there is none. Its errors do not contain the token.
func (b *bearer) read() (string, error) {
	text := ""
	if b.file != "" {
		data, err := os.ReadFile(b.file)
		if err != nil {
			return "", err
		}
		if text = strings.TrimSpace(string(data)); text == "" {
			return "", fmt.Errorf("%s is empty", b.file)
		}
	} else if b.variable != "" {
		text = strings.TrimSpace(os.Getenv(b.variable))
	}
	if strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", errors.New("invalid token: want one word of ASCII")
	}
	return text, nil
}

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (b *bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	text, err := b.read()
	if err != nil {
		return nil, err
	}
	return map[string]string{"authorization": "Bearer " + text}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials. DialOptions permits clear text on loopback only.
func (b *bearer) RequireTransportSecurity() bool { return false }
