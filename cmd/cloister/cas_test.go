// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/diskctl"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localstore"
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
