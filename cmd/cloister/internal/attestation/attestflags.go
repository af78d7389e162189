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
	"path/filepath"
	"runtime"

	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/worker/repro/attest"
	"github.com/spf13/cobra"
)

// An evidence is the flags by which a command writes a statement.
type Flags struct {
	Path, Key      string
	PassphraseFile string
}

func (e *Flags) Register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&e.Path, "attest", "", "file for an in-toto Statement of the findings")
	f.StringVar(&e.Key, "key", "", "private key to sign with, in OpenSSH or PEM format, or a public key for ssh-agent")
	f.StringVar(&e.PassphraseFile, "passphrase-file", "", "file with the passphrase of --key in its first line (default: prompt on the terminal)")
}

// Load returns the key that the flags name, nil if they name none; before anything is run, so that a wrong one costs
// nothing.
func (e *Flags) Load(ctx context.Context) (*attest.Key, error) {
	switch {
	case e.Key == "" && e.PassphraseFile != "":
		return nil, errors.New("--passphrase-file is for --key, which is not given")
	case e.Key == "":
		return nil, nil
	case e.Path == "":
		return nil, errors.New("--key signs what --attest writes, which is not given")
	}
	text, mode, err := readKey(e.Key)
	if err != nil {
		return nil, fmt.Errorf("--key: %w", err)
	}
	if public, err := attest.ParsePublicKeys(text); err == nil {
		return e.byAgent(ctx, public)
	}
	if err := onlyOurs(e.Key, mode); err != nil {
		return nil, fmt.Errorf("--key %w", err)
	}
	k, err := attest.ParsePrivateKey(text, nil)
	if errors.Is(err, attest.ErrPassphrase) {
		var passphrase []byte
		if passphrase, err = e.passphrase(ctx); err == nil {
			k, err = attest.ParsePrivateKey(text, passphrase)
		}
	} else if err == nil && e.PassphraseFile != "" {
		err = errors.New("it has no passphrase: leave --passphrase-file out")
	}
	if err != nil {
		return nil, fmt.Errorf("--key %s: %w", render.Quote(e.Key), err)
	}
	return k, nil
}

// byAgent returns a key whose private half an ssh-agent has.
func (e *Flags) byAgent(ctx context.Context, public []*attest.Key) (*attest.Key, error) {
	switch {
	case len(public) > 1:
		return nil, fmt.Errorf("--key %s: there are %d public keys in it: write one to a file of its own", render.Quote(e.Key), len(public))
	case e.PassphraseFile != "":
		return nil, fmt.Errorf("--key %s: it is a public key, whose private half ssh-agent has: leave --passphrase-file out", render.Quote(e.Key))
	}
	socket := os.Getenv("SSH_AUTH_SOCK")
	if socket == "" {
		return nil, fmt.Errorf("--key %s: it is a public key, and there is no ssh-agent that could have the private one: SSH_AUTH_SOCK is not set", render.Quote(e.Key))
	}
	k, err := attest.AgentKey(ctx, socket, public[0])
	if err != nil {
		return nil, fmt.Errorf("--key %s: %w", render.Quote(e.Key), err)
	}
	return k, nil
}

// passphrase returns that of the key.
func (e *Flags) passphrase(ctx context.Context) ([]byte, error) {
	if e.PassphraseFile != "" {
		text, mode, err := readKey(e.PassphraseFile)
		if err == nil {
			err = onlyOurs(e.PassphraseFile, mode)
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
		return nil, fmt.Errorf("%w, and cannot be asked for: %w; give it by --passphrase-file FILE, or add the key to ssh-agent and state --key %s",
			attest.ErrPassphrase, err, render.Quote(e.Key+".pub"))
	}
	return passphrase, nil
}

// readKey reads a file that may be secret, and says what mode it has.
func readKey(path string) ([]byte, os.FileMode, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, 0, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	text, err := io.ReadAll(io.LimitReader(f, attest.MaxKey+1))
	if err == nil && len(text) > attest.MaxKey {
		err = fmt.Errorf("%s has more than %d bytes", render.Quote(path), attest.MaxKey)
	}
	return text, info.Mode(), err
}

// onlyOurs fails if others may read or change a file of that mode.
func onlyOurs(path string, mode os.FileMode) error {
	if runtime.GOOS != "windows" && mode.IsRegular() && mode.Perm()&0o077 != 0 {
		return fmt.Errorf("%s: others may read or change it (mode %04o); fix: chmod 600 %s", render.Quote(path), mode.Perm(), render.Quote(path))
	}
	return nil
}

// Write writes the statement, signed if there is a key; the file is there whole or as it was.
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

// replaceFile writes a file, by a rename; what is no regular file, as a link or a device, is written to as it is.
func replaceFile(path string, text []byte) error {
	if fi, err := os.Lstat(path); err == nil && !fi.Mode().IsRegular() {
		return os.WriteFile(path, text, 0o666)
	}
	// Under a name of nobody's, beside it, since a rename works within a file system only.
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	_, err = file.Write(text)
	if err == nil {
		err = file.Chmod(0o644)
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}
