// SPDX-License-Identifier: Apache-2.0

// Package identity defines the flags for the credentials that a client shows to a server.
package identity

import (
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strings"

	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/worker/transport"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
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
	i.variable = flags.Variable(prefix + "token")
	f.StringVar(&i.CA, prefix+"tls-ca", "", "PEM file of the authorities of the server's certificate (default: those of this host)")
	f.StringVar(&i.Cert, prefix+"tls-cert", "", "PEM file of the client certificate; needs --"+prefix+"tls-key")
	f.StringVar(&i.Key, prefix+"tls-key", "", "PEM file of the key of --"+prefix+"tls-cert")
	f.StringVar(&i.Token, prefix+"token-file", "", "file with the bearer token (default: the variable "+i.variable+")")
	flags.Share(f, i.Names()...)
}

// Names returns the names of the flags.
func (i *Flags) Names() []string {
	return []string{i.prefix + "tls-ca", i.prefix + "tls-cert", i.prefix + "tls-key", i.prefix + "token-file"}
}

// Sources names the flags and the variable that may have the credentials, for messages.
func (i *Flags) Sources() string {
	return fmt.Sprintf("--%stoken-file, %s or --%[1]stls-cert", i.prefix, i.variable)
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
	options, err := i.Credentials().DialOptions(address)
	return options, i.Explain(address, err)
}

// Credentials returns the credentials that the flags name.
func (i *Flags) Credentials() transport.Credentials {
	return transport.Credentials{CA: i.CA, Cert: i.Cert, Key: i.Key, Token: i.Token, TokenVariable: i.variable, Log: slog.Default()}
}

// Explain returns an error of dialling address with the credentials as a usage error that names the flags.
func (i *Flags) Explain(address string, err error) error {
	file, ofFile := errors.AsType[*transport.FileError](err)
	switch {
	case err == nil:
		return nil
	case (i.Cert == "") != (i.Key == ""):
		err = fmt.Errorf("--%stls-cert and --%[1]stls-key go together", i.prefix)
	case !strings.HasPrefix(address, "grpcs://") && i.CA+i.Cert != "":
		err = fmt.Errorf("--%stls-ca and --%[1]stls-cert need a server with TLS: write its address as grpcs://HOST:PORT", i.prefix)
	case ofFile:
		flag := map[string]string{"CA": "tls-ca", "Cert": "tls-cert", "Token": "token-file"}[file.Field]
		err = fmt.Errorf("--%s%s: %w", i.prefix, flag, file.Err)
	}
	return exit.New(exit.Usage, err)
}
