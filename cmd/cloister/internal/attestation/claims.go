// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/worker/repro/attest"
)

// Claims are the requirements of attest verify on a statement.
type Claims struct {
	Keys         []string
	Unsigned     bool
	Files        []string
	Action       string
	Reproducible bool
}

// Check reads a statement, and returns it with the IDs of the keys that signed it if it meets the requirements.
func (c *Claims) Check(ctx context.Context, path string) (*attest.Statement, []string, error) {
	if (len(c.Keys) > 0) == c.Unsigned {
		return nil, nil, errors.New("pass --key with accepted keys, or --unsigned to check no signature")
	}
	action := cas.Digest{}
	if c.Action != "" {
		var err error
		if action, err = cas.ParseDigest(c.Action); err != nil {
			return nil, nil, fmt.Errorf("--action: %w", err)
		}
	}
	var keys []*attest.Key
	for _, name := range c.Keys {
		text, _, err := readFile(name, attest.MaxFile)
		if err != nil {
			return nil, nil, exit.New(exit.Usage, fmt.Errorf("--key: %w", err))
		}
		if _, err := attest.ParsePrivateKey(text, nil); err == nil || errors.Is(err, attest.ErrPassphrase) {
			return nil, nil, exit.New(exit.Usage, fmt.Errorf("--key %s is a private key; pass its public key, such as %s.pub",
				render.Quote(name), render.Quote(name)))
		}
		more, err := attest.ParsePublicKeys(text)
		if err != nil {
			return nil, nil, exit.New(exit.Usage, fmt.Errorf("--key %s: %w", name, err))
		}
		keys = append(keys, more...)
	}
	text, _, err := readFile(path, attest.MaxFile)
	if err != nil {
		return nil, nil, exit.New(exit.Usage, err)
	}
	no := func(format string, args ...any) (*attest.Statement, []string, error) {
		return nil, nil, exit.New(exit.No, fmt.Errorf("%s: %w", path, fmt.Errorf(format, args...)))
	}
	s, by, err := attest.Open(ctx, text, keys)
	if err != nil {
		return no("%w", err)
	}
	if about := StatedAction(s); c.Action != "" && about != action.String() {
		return no("it is about action %s, not %s", render.Quote(about), action)
	}
	if c.Reproducible && (s.Reproducibility == nil || s.Reproducibility.Verdict != attest.Same) {
		return no("it does not state that the action is reproducible")
	}
	for _, name := range c.Files {
		sum, err := sha256File(name)
		if err != nil {
			return nil, nil, exit.New(exit.Usage, fmt.Errorf("--file: %w", err))
		}
		// Digests of links and directories are not those of a file's content.
		if !slices.ContainsFunc(s.Subjects, func(d attest.Descriptor) bool { return d.MediaType == "" && d.Digest["sha256"] == sum }) {
			return no("%s, with SHA-256 %s, is not a file among its %d subjects", name, sum, len(s.Subjects))
		}
	}
	return s, by, nil
}

// StatedAction returns the digest of the action that a statement is about.
func StatedAction(s *attest.Statement) string {
	if s.Provenance != nil {
		return s.Provenance.BuildDefinition.ExternalParameters.Action
	}
	return s.Reproducibility.Action.Name
}

func sha256File(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
