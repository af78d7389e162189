// SPDX-License-Identifier: Apache-2.0

package attest_test

import (
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"log"
	"strings"

	"github.com/cloister-build/cloister/worker/repro/attest"
)

// A signed statement that two runs of an action agree, checked with the public key.
func ExampleSign() {
	ctx := context.Background()
	private := ed25519.NewKeyFromSeed([]byte(strings.Repeat("s", ed25519.SeedSize))) // yours comes from a file
	key, err := attest.ParsePrivateKey(encode("PRIVATE KEY", orExit(x509.MarshalPKCS8PrivateKey(private))), nil)
	if err != nil {
		log.Fatal(err)
	}
	keys, err := attest.ParsePublicKeys(encode("PUBLIC KEY", orExit(x509.MarshalPKIXPublicKey(private.Public()))))
	if err != nil {
		log.Fatal(err)
	}

	signed, err := attest.Sign(ctx, statement(), key)
	if err != nil {
		log.Fatal(err)
	}
	s, signers, err := attest.Open(ctx, signed, keys)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(s.Reproducibility.Verdict, len(signers), signers[0] == keys[0].ID())
	// Output: same 1 true
}

// statement says that two runs, the second under another clock, wrote the same file.
func statement() *attest.Statement {
	digest := func(digit string) map[string]string { return map[string]string{"sha256": strings.Repeat(digit, 64)} }
	outputs := []attest.Descriptor{{Name: "bin/app", Digest: digest("a")}}
	return &attest.Statement{Subjects: outputs, Reproducibility: &attest.Reproducibility{
		Verdict: attest.Same, Action: attest.Descriptor{Name: strings.Repeat("d", 64) + "/142", Digest: digest("d")},
		Tool: "example",
		Runs: []attest.Run{{Outputs: outputs}, {Outputs: outputs, Varied: []string{"time +400d"}}},
	}}
}

func orExit(b []byte, err error) []byte {
	if err != nil {
		log.Fatal(err)
	}
	return b
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}
