// SPDX-License-Identifier: Apache-2.0

package diskctl_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cmd/cloister/internal/diskctl"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
)

// TestOpenRefusesServerOfAnotherUser puts a socket of this user into the store of another one.
func TestOpenRefusesServerOfAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		sandboxtest.Unavailable(t, "root", "only root can change the owner of a directory")
	}
	dir := filepath.Join(t.TempDir(), "store")
	openStore(t, dir)
	serveFake(t, dir, hostile{})
	if c := client(t, dir); c.Holder() != os.Getpid() {
		t.Fatalf("got holder %d, want this process", c.Holder())
	}
	must.Succeed(t, os.Chown(dir, 63210, 63210))
	if c, err := diskctl.Open(t.Context(), dir, 0); err == nil ||
		!strings.Contains(err.Error(), "belongs to user 63210") {
		t.Errorf("got %v, %v, want an error naming the owner", c, err)
	}
}
