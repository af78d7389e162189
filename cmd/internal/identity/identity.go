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

// Flags are the credentials for one server, and the authorities that verify it. A command with two servers has Flags
// with different prefixes, so that each credential goes only to the server that it was named for.
type Flags struct {
	CA, Cert, Key, Token string // files
	prefix               string // of the flags
	variable             string // environment variable with a token, if there is no file
}

// Register adds the flags. A prefix distinguishes the flags of several servers.
func (i *Flags) Register(f *pflag.FlagSet, prefix string) {
	i.prefix = prefix
	i.variable = "CLOISTER_" + strings.ToUpper(strings.ReplaceAll(prefix, "-", "_")) + "TOKEN"
	f.StringVar(&i.CA, prefix+"tls-ca", "", "PEM file of the authorities of the server's certificate (default: those of this host)")
	f.StringVar(&i.Cert, prefix+"tls-cert", "", "PEM file of the client certificate; needs --"+prefix+"tls-key")
	f.StringVar(&i.Key, prefix+"tls-key", "", "PEM file of the key of --"+prefix+"tls-cert")
	f.StringVar(&i.Token, prefix+"token-file", "", "file with the bearer token (default: the variable "+i.variable+")")
}

// Names returns the names of the flags.
func (i *Flags) Names() []string {
	return []string{i.prefix + "tls-ca", i.prefix + "tls-cert", i.prefix + "tls-key", i.prefix + "token-file"}
}

// Set reports whether a flag or the variable is set.
func (i *Flags) Set() bool {
	return i.CA+i.Cert+i.Key+i.Token != "" || os.Getenv(i.variable) != ""
}

// SameServer reports whether two addresses name the same server, possibly with different instances.
func SameServer(a, b string) bool {
	u, err := url.Parse(a)
	v, err2 := url.Parse(b)
	return err == nil && err2 == nil && u.Scheme == v.Scheme && u.Host == v.Host
}

// DialOptions returns the options to dial a grpc:// or grpcs:// address. Mistakes in the flags are usage errors.
func (i *Flags) DialOptions(address string) ([]grpc.DialOption, error) {
	secure := strings.HasPrefix(address, "grpcs://")
	var options []grpc.DialOption
	switch {
	case (i.Cert == "") != (i.Key == ""):
		return nil, exit.New(exit.Usage, fmt.Errorf("--%stls-cert and --%[1]stls-key go together", i.prefix))
	case !secure && i.CA+i.Cert != "":
		return nil, exit.New(exit.Usage, fmt.Errorf("--%stls-ca and --%[1]stls-cert need a server with TLS: write its address as grpcs://HOST:PORT", i.prefix))
	case secure:
		config, err := i.tls()
		if err != nil {
			return nil, err
		}
		options = append(options, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	}
	t := bearer{file: i.Token, variable: i.variable}
	if text, err := t.read(); err != nil {
		return nil, exit.New(exit.Usage, fmt.Errorf("--%stoken-file: %w", i.prefix, err))
	} else if text == "" {
		return options, nil
	}
	if !secure && !onLoopback(address) {
		return nil, exit.New(exit.Usage, errors.New("refusing to send a token in clear text: write the address as grpcs://HOST:PORT, or send none"))
	}
	return append(options, grpc.WithPerRPCCredentials(&t)), nil
}

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

// onLoopback reports whether an address is on this host, where nobody can listen in.
func onLoopback(address string) bool {
	u, err := url.Parse(address)
	if err != nil {
		return false
	}
	ip := net.ParseIP(u.Hostname())
	return u.Hostname() == "localhost" || ip != nil && ip.IsLoopback()
}

// A bearer sends a token with each call. It rereads the file each time, because tokens are renewed during a command.
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
