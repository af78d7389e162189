// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/diskctl"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localstore"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestVerifyReportsUnnamedBlobs: for a blob whose digest the store cannot reconstruct, verify claims neither "no
// digest" nor that nothing was kept.
func TestVerifyReportsUnnamedBlobs(t *testing.T) {
	store := &localstore.Store{Dir: t.TempDir(), Client: &diskctl.Client{}}
	r := &disk.VerifyReport{Damaged: []disk.Damage{{Instance: "main", Where: "segments/1.data at 0"}}}
	var text, json strings.Builder
	must.Succeed(t, verifyText(&text, store, r, true, 0))
	must.Succeed(t, verifyJSON(&json, store, r, true))
	for _, lie := range []string{"no digest", "nowhere"} {
		expect.That(t, !strings.Contains(text.String()+json.String(), lie), "%q in\n%s%s", lie, &text, &json)
	}
	if !strings.Contains(text.String(), "SHA512") || !strings.Contains(text.String(), "quarantine") || !strings.Contains(json.String(), `"digest": ""`) {
		t.Errorf("got\n%s%s", &text, &json)
	}
}

// A closing is a writer that closes the store, so that the command fails to close it.
type closing struct{ *localstore.Store }

func (c closing) Write(p []byte) (int, error) {
	_ = c.Close() // the first one succeeds
	return len(p), nil
}

// TestStoreThatDoesNotCloseIsAnError: what gc, rm and verify wrote to the store may be lost.
func TestStoreThatDoesNotCloseIsAnError(t *testing.T) {
	dir := t.TempDir()
	must.Succeed(t, must.Get(disk.Open(disk.Config{Dir: dir, MaxBytes: 64 << 20}))(t).Close())
	for name, command := range map[string]func(s *localstore.Store) error{
		"gc": func(s *localstore.Store) error {
			c := &gcConfig{store: *s, olderThan: flags.Duration(time.Hour)}
			return gc(t.Context(), c, closing{&c.store}, io.Discard)
		},
		"rm": func(s *localstore.Store) error {
			return cacheRm(t.Context(), s, "", []cas.Digest{cas.SHA256.Sum(nil)}, false, closing{s})
		},
		"verify": func(s *localstore.Store) error {
			return casVerify(t.Context(), s, disk.VerifyOptions{}, closing{s}, io.Discard)
		},
	} {
		err := command(&localstore.Store{Dir: dir})
		expect.Error(t, err, os.ErrClosed, name)
		expect.Message(t, err, "close the store", name)
	}
}
