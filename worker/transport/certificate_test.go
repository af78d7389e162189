// SPDX-License-Identifier: Apache-2.0

package transport_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/transport"
)

// TestPoolIsWholeOrAnError: no authority of a file is skipped.
func TestPoolIsWholeOrAnError(t *testing.T) {
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der := must.Get(x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key))(t)
	good := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	broken := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der[:len(der)-1]})
	lines := bytes.SplitAfter(good, []byte("\n"))
	for name, c := range map[string]struct{ text, want string }{
		"one":                        {string(good), ""},
		"two with comments":          {"# first\n" + string(good) + "# second\n" + string(good) + "\n# end\n", ""},
		"Windows lines":              {strings.ReplaceAll(string(good), "\n", "\r\n"), ""},
		"a broken one after a good":  {string(good) + string(broken), "certificate 2: "},
		"a broken one before a good": {string(broken) + string(good), "certificate 1: "},
		"one without an end":         {string(bytes.Join(lines[:len(lines)-2], nil)), "1 of 1 PEM blocks are damaged"},
		"one without an end, and another": {
			string(bytes.Join(lines[:len(lines)-2], nil)) + string(good), "1 of 2 PEM blocks are damaged",
		},
		"one with a damaged line": {
			string(bytes.Join(slices.Insert(slices.Clone(lines), 2, []byte("!\n")), nil)) + string(good), "1 of 2 PEM blocks are damaged",
		},
		"another kind of block": {string(good) + strings.ReplaceAll(string(good), "CERTIFICATE", "PUBLIC KEY"), `PEM block 2 is "PUBLIC KEY"`},
		"nothing":               {"", "no certificate found"},
		"no PEM":                {"ssh-ed25519 AAAA", "no certificate found"},
	} {
		file := filepath.Join(t.TempDir(), "ca.pem")
		must.Succeed(t, os.WriteFile(file, []byte(c.text), 0o600))
		pool, err := transport.ReadPool(file)
		if c.want == "" && (err != nil || pool == nil) || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), file)) {
			t.Errorf("%s: got %v, want %q", name, err, c.want)
		}
	}
}
