// SPDX-License-Identifier: Apache-2.0

package farmworker

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/spf13/cobra"
)

// TestTokensGoToTheirServers: scheduler and store receive only their own tokens.
func TestTokensGoToTheirServers(t *testing.T) {
	scheduler, atScheduler := grpctest.Authorization(t)
	storage, atStorage := grpctest.Authorization(t)
	file := filepath.Join(t.TempDir(), "token")
	must.Succeed(t, os.WriteFile(file, []byte("of-the-file"), 0o600))
	for name, c := range map[string]struct {
		flags            string
		token, casToken  string // variables
		shown, shownToIt string // to the scheduler, and to the store
	}{
		"one server":                {"", "one", "", "Bearer one", "Bearer one"},
		"one server, two tokens":    {"", "one", "two", "Bearer one", "Bearer two"},
		"one server, by a file":     {"--token-file " + file, "one", "", "Bearer of-the-file", "Bearer of-the-file"},
		"one server, named twice":   {"--cas grpc://" + scheduler + "/main", "one", "", "Bearer one", "Bearer one"},
		"one server, as two":        {"--cas grpc://" + scheduler, "one", "two", "Bearer one", "Bearer two"},
		"two servers":               {"--cas grpc://" + storage, "one", "", "Bearer one", ""},
		"two servers with tokens":   {"--cas grpc://" + storage, "one", "two", "Bearer one", "Bearer two"},
		"two servers, by a file":    {"--token-file " + file + " --cas grpc://" + storage, "", "", "Bearer of-the-file", ""},
		"a file of the store":       {"--cas-token-file " + file + " --cas grpc://" + storage, "one", "two", "Bearer one", "Bearer of-the-file"},
		"a file for the same again": {"--cas-token-file " + file + " --cas grpc://" + scheduler, "one", "", "Bearer one", "Bearer of-the-file"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("CLOISTER_TOKEN", c.token)
			t.Setenv("CLOISTER_CAS_TOKEN", c.casToken)
			join := Config{Config: node.NewConfig()}
			cmd := &cobra.Command{}
			join.Register(cmd)
			must.Succeed(t, cmd.ParseFlags(strings.Fields("--scheduler grpc://"+scheduler+" "+c.flags)))
			must.Succeed(t, join.Check(cmd))
			expect.Equal(t, atScheduler(join.Identity.DialOptions("grpc://"+scheduler)), c.shown,
				"the scheduler is shown")
			expect.Equal(t, atStorage(join.Upstream.Identity.DialOptions("grpc://"+storage)), c.shownToIt,
				"the store is shown")
		})
	}
}

// TestStoreID: a directory keeps its ID, others have different ones, and a damaged one is replaced.
func TestStoreID(t *testing.T) {
	id := func(dir string) string {
		t.Helper()
		return must.Get(storeID(dir))(t)
	}
	dir := t.TempDir()
	first := id(dir)
	if again := id(dir); again != first || len(first) < 26 {
		t.Errorf("%q, and then %q", first, again)
	}
	if other := id(t.TempDir()); other == first {
		t.Errorf("two directories are called %q", other)
	}
	for _, damage := range []string{"", "\x00\x00\x00", "a b"} {
		must.Succeed(t, os.WriteFile(filepath.Join(dir, "worker.id"), []byte(damage), 0o600))
		if anew := id(dir); anew == first || id(dir) != anew {
			t.Errorf("of %q came %q, and then %q", damage, anew, id(dir))
		}
	}
	if _, err := storeID(filepath.Join(dir, "nowhere")); err == nil {
		t.Error("there is one of a directory that there is not")
	}
}
