// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestTokensAreNotSentInClearText to other hosts, and no message repeats one.
func TestTokensAreNotSentInClearText(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	must.Succeed(t, os.WriteFile(file, []byte("secret-token\n"), 0o600))
	for address, good := range map[string]bool{
		"grpcs://build.example.com:443": true, "grpc://127.0.0.1:8980": true, "grpc://[::1]:8980/main": true, "grpc://localhost:8980": true,
		"grpc://build.example.com:8980": false, "grpc://10.0.0.1:8980": false, "grpc://127.0.0.1.example.com:1": false, "grpc://localhost@example.com:1": false, "": false,
	} {
		for _, variable := range []string{"", "secret-token"} {
			t.Setenv("CLOISTER_TOKEN", variable)
			i := &Flags{variable: "CLOISTER_TOKEN"}
			if variable == "" {
				i.Token = file
			}
			options, err := i.DialOptions(address)
			if (err == nil) != good || good && len(options) == 0 {
				t.Errorf("%s: %d options, %v", address, len(options), err)
			}
			var e *exit.Error
			if err != nil && (!errors.As(err, &e) || e.Code != exit.Usage || strings.Contains(err.Error(), "secret")) {
				t.Errorf("%s: %v", address, err)
			}
		}
	}
}

// TestIdentityMistakes: flags that would have no effect are rejected.
func TestIdentityMistakes(t *testing.T) {
	t.Setenv("CLOISTER_TOKEN", "")
	for name, c := range map[string]struct {
		i       Flags
		address string
	}{
		"a certificate without a key":    {Flags{Cert: "c"}, "grpcs://h:1"},
		"a key without a certificate":    {Flags{Key: "c"}, "grpcs://h:1"},
		"authorities without TLS":        {Flags{CA: "c"}, "grpc://h:1"},
		"a certificate without TLS":      {Flags{Cert: "c", Key: "k"}, "grpc://h:1"},
		"authorities that are not there": {Flags{CA: "/nonexistent"}, "grpcs://h:1"},
		"a pair that is not there":       {Flags{Cert: "/nonexistent", Key: "/nonexistent"}, "grpcs://h:1"},
		"a token that is not there":      {Flags{Token: "/nonexistent"}, "grpcs://h:1"},
	} {
		var e *exit.Error
		if _, err := c.i.DialOptions(c.address); !errors.As(err, &e) || e.Code != exit.Usage {
			t.Errorf("%s: %v", name, err)
		}
	}
	expect.Equal(t, len(must.Get((&Flags{}).DialOptions("grpc://build.example.com:8980"))(t)), 0, "without flags")
}
