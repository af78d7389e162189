// SPDX-License-Identifier: Apache-2.0

// Package identity defines the flags for the credentials that a client shows to a server.
package identity

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"strings"

	"github.com/cloister-build/cloister/cmd/internal/certificate"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
)

// Flags is the flags that say whom a server is to be, and who calls it: one server, so that no credential is shown to
// another than it was named for. Of two servers each has flags of its own, with another prefix, and a variable of its own.
type Flags struct {
	prefix                         string // of the flags
	CA, Cert, Key, Token, variable string // from is the variable that a token may stand in
}

// Register adds the flags. A prefix is that of flags for one of several servers.
func (i *Flags) Register(f *pflag.FlagSet, prefix string) {
	i.prefix = prefix
	i.variable = "CLOISTER_" + strings.ToUpper(strings.ReplaceAll(prefix, "-", "_")) + "TOKEN"
	f.StringVar(&i.CA, prefix+"tls-ca", "", "PEM file of the authorities of the server's certificate (default: those of this host)")
	f.StringVar(&i.Cert, prefix+"tls-cert", "", "PEM file of the client certificate; needs --"+prefix+"tls-key")
	f.StringVar(&i.Key, prefix+"tls-key", "", "PEM file of the key of --"+prefix+"tls-cert")
	f.StringVar(&i.Token, prefix+"token-file", "", "file with the bearer token (default: the variable "+i.variable+")")
}

// Names are the names of the flags.
func (i *Flags) Names() []string {
	return []string{i.prefix + "tls-ca", i.prefix + "tls-cert", i.prefix + "tls-key", i.prefix + "token-file"}
}

// Set reports whether anything is said, by a flag or the variable.
func (i *Flags) Set() bool {
	return i.CA+i.Cert+i.Key+i.Token != "" || os.Getenv(i.variable) != ""
}

// SameServer reports whether two addresses are of one server, whichever instance they name.
func SameServer(a, b string) bool {
	u, err := url.Parse(a)
	v, err2 := url.Parse(b)
	return err == nil && err2 == nil && u.Scheme == v.Scheme && u.Host == v.Host
}

// DialOptions returns how to dial the server of an address, grpc:// or grpcs://. A mistake in the flags is one of usage.
func (i *Flags) DialOptions(address string) ([]grpc.DialOption, error) {
	secure := strings.HasPrefix(address, "grpcs://")
	var options []grpc.DialOption
	switch {
	case (i.Cert == "") != (i.Key == ""):
		return nil, exit.New(exit.Usage, fmt.Errorf("--%stls-cert and --%[1]stls-key go together", i.prefix))
	case !secure && i.CA+i.Cert != "":
		return nil, exit.New(exit.Usage, fmt.Errorf("--%stls-ca and --%[1]stls-cert are for a server with TLS: write its address as grpcs://HOST:PORT", i.prefix))
	case secure:
		config, err := i.tls()
		if err != nil {
			return nil, err
		}
		options = append(options, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	}
	t := bearer{file: i.Token, from: i.variable}
	if text, err := t.read(); err != nil {
		return nil, exit.New(exit.Usage, fmt.Errorf("--%stoken-file: %w", i.prefix, err))
	} else if text == "" {
		return options, nil
	}
	if !secure && !onLoopback(address) {
		return nil, exit.New(exit.Usage, errors.New("a token is not sent in clear text: write the address as grpcs://HOST:PORT, or send none"))
	}
	return append(options, grpc.WithPerRPCCredentials(&t)), nil
}

// tls returns the configuration of a connection.
func (i *Flags) tls() (*tls.Config, error) {
	config := &tls.Config{}
	if i.CA != "" {
		pool, err := certificate.ReadPool(i.CA)
		if err != nil {
			return nil, exit.New(exit.Usage, fmt.Errorf("--%stls-ca: %w", i.prefix, err))
		}
		config.RootCAs = pool
	}
	if i.Cert != "" {
		pair, err := certificate.NewPair(i.Cert, i.Key, slog.Default())
		if err != nil {
			return nil, exit.New(exit.Usage, fmt.Errorf("--%stls-cert: %w", i.prefix, err))
		}
		pair.Client(config)
	}
	return config, nil
}

// onLoopback reports whether an address is of this host, so that nobody else sees what is sent there.
func onLoopback(address string) bool {
	u, err := url.Parse(address)
	if err != nil {
		return false
	}
	ip := net.ParseIP(u.Hostname())
	return u.Hostname() == "localhost" || ip != nil && ip.IsLoopback()
}

// A bearer sends a token with each call. It reads the file each time: tokens are renewed while we run.
type bearer struct {
	file string
	from string // the variable, where there is no file
}

// read returns the token, or "" if there is none. Messages do not repeat it.
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
	} else if b.from != "" {
		text = strings.TrimSpace(os.Getenv(b.from))
	}
	if strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", errors.New("a token is one word of ASCII")
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

// RequireTransportSecurity implements credentials.PerRPCCredentials. Where there is none, options has made sure that the
// server is on this host.
func (b *bearer) RequireTransportSecurity() bool { return false }
