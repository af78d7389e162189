// SPDX-License-Identifier: Apache-2.0

// Package attestation makes, writes and checks statements about actions.
package attestation

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"

	"github.com/cloister-build/cloister/cas/durable"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/worker/repro/attest"
	"github.com/spf13/cobra"
)

// Flags are the flags of commands that write a statement.
type Flags struct {
	Path, Key      string
	PassphraseFile string
}

// Register adds the flags.
func (e *Flags) Register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&e.Path, "attest", "", "file for an in-toto Statement of the findings")
	f.StringVar(&e.Key, "key", "", "private key to sign with, in OpenSSH or PEM format, or a public key for ssh-agent")
	f.StringVar(&e.PassphraseFile, "passphrase-file", "", "file with the passphrase of --key in its first line (default: prompt on the terminal)")
	flags.Share(f, "passphrase-file")
}

// Load returns the key of the flags, nil if there is none. Commands call it before any run, so that a wrong key costs
// nothing.
func (e *Flags) Load(ctx context.Context) (*attest.Key, error) {
	switch {
	case e.Key == "" && e.PassphraseFile != "":
		return nil, errors.New("--passphrase-file needs --key")
	case e.Key == "":
		return nil, nil
	case e.Path == "":
		return nil, errors.New("--key needs --attest")
	}
	text, mode, err := readFile(e.Key, attest.MaxKey)
	if err != nil {
		return nil, fmt.Errorf("--key: %w", err)
	}
	if public, err := attest.ParsePublicKeys(text); err == nil {
		return e.agentKey(ctx, public)
	}
	if err := checkPrivate(e.Key, mode); err != nil {
		return nil, fmt.Errorf("--key %w", err)
	}
	k, err := attest.ParsePrivateKey(text, nil)
	if errors.Is(err, attest.ErrPassphrase) {
		var passphrase []byte
		if passphrase, err = e.passphrase(ctx); err == nil {
			k, err = attest.ParsePrivateKey(text, passphrase)
		}
	} else if err == nil && e.PassphraseFile != "" {
		err = errors.New("the key has no passphrase: omit --passphrase-file")
	}
	if err != nil {
		return nil, fmt.Errorf("--key %s: %w", render.Quote(e.Key), err)
	}
	return k, nil
}

// agentKey returns a key whose private half is in ssh-agent.
func (e *Flags) agentKey(ctx context.Context, public []*attest.Key) (*attest.Key, error) {
	switch {
	case len(public) > 1:
		return nil, fmt.Errorf("--key %s: the file has %d public keys, want one", render.Quote(e.Key), len(public))
	case e.PassphraseFile != "":
		return nil, fmt.Errorf("--key %s: a public key selects ssh-agent: omit --passphrase-file", render.Quote(e.Key))
	}
	socket := os.Getenv("SSH_AUTH_SOCK")
	if socket == "" {
		return nil, fmt.Errorf("--key %s: a public key selects ssh-agent, but SSH_AUTH_SOCK is not set", render.Quote(e.Key))
	}
	k, err := attest.AgentKey(ctx, socket, public[0])
	if err != nil {
		return nil, fmt.Errorf("--key %s: %w", render.Quote(e.Key), err)
	}
	return k, nil
}

// passphrase returns the passphrase of the key.
func (e *Flags) passphrase(ctx context.Context) ([]byte, error) {
	if e.PassphraseFile != "" {
		text, mode, err := readFile(e.PassphraseFile, attest.MaxKey)
		if err == nil {
			err = checkPrivate(e.PassphraseFile, mode)
		}
		if err != nil {
			return nil, fmt.Errorf("--passphrase-file %w", err)
		}
		line, _, _ := bytes.Cut(text, []byte("\n"))
		return bytes.TrimSuffix(line, []byte("\r")), nil
	}
	passphrase, err := terminal.AskSecret(ctx, fmt.Sprintf("Passphrase of %s: ", render.Quote(e.Key)))
	var by *interrupt.Error
	switch {
	case errors.As(err, &by):
		return nil, exit.New(by.ExitCode(), errors.New("stopped"))
	case err != nil:
		return nil, fmt.Errorf("%w, and prompting failed: %w; pass --passphrase-file FILE, or add the key to ssh-agent and pass --key %s",
			attest.ErrPassphrase, err, render.Quote(e.Key+".pub"))
	}
	return passphrase, nil
}

// readFile reads a file of at most limit bytes, and returns its mode.
func readFile(path string, limit int64) ([]byte, os.FileMode, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, 0, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	text, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(text)) > limit {
		err = fmt.Errorf("%s has more than %d bytes", render.Quote(path), limit)
	}
	return text, info.Mode(), err
}

// checkPrivate fails if others can read or change a file of that mode.
func checkPrivate(path string, mode os.FileMode) error {
	if runtime.GOOS != "windows" && mode.IsRegular() && mode.Perm()&0o077 != 0 {
		return fmt.Errorf("%s: others can read or change it (mode %04o); fix: chmod 600 %s", render.Quote(path), mode.Perm(), render.Quote(path))
	}
	return nil
}

// Write writes the statement, signed if k is not nil, and replaces the file atomically.
func (e *Flags) Write(ctx context.Context, s *attest.Statement, k *attest.Key) error {
	if e.Path == "" {
		return nil
	}
	text, err := s.Encode()
	if err == nil && k != nil {
		text, err = attest.Sign(ctx, s, k)
	}
	if err == nil {
		err = replaceFile(e.Path, append(bytes.TrimSpace(text), '\n'))
	}
	if err != nil {
		return fmt.Errorf("--attest: %w", err)
	}
	return nil
}

// replaceFile replaces a regular file atomically, and writes to anything else, such as a link or a device, directly.
func replaceFile(path string, text []byte) error {
	if fi, err := os.Lstat(path); err == nil && !fi.Mode().IsRegular() {
		return os.WriteFile(path, text, 0o666)
	}
	return durable.WriteFile(path, text, 0o644)
}
