// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cmd/internal/exit"
)

// TestOnRejectsPasswords: an address with a password is rejected and not repeated.
func TestOnRejectsPasswords(t *testing.T) {
	for _, on := range []string{"grpc://me:secret@127.0.0.1:1", "grpc://127.0.0.1:1/?secret", "http://secret:1", "grpc://secret", "secret"} {
		if text, code := runCLI(t, "repro", "--on", on, "--", "true"); code != exit.Usage || strings.Contains(text, "secret") || !strings.Contains(text, "--on") {
			t.Errorf("%s: exit %d, %s", on, code, text)
		}
	}
}
