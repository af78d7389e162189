// SPDX-License-Identifier: Apache-2.0

package diskctl_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas/diskctl"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
)

// TestAnotherUserIsNotAsked: who has put a socket into the directory is believed only if the store is his.
func TestAnotherUserIsNotAsked(t *testing.T) {
	if os.Getuid() != 0 {
		sandboxtest.Unavailable(t, "root", "nobody else may give a directory away")
	}
	dir := filepath.Join(t.TempDir(), "store")
	stored(t, dir)
	behind(t, dir, hostile{})
	if c := client(t, dir); c.Holder() != os.Getpid() {
		t.Fatalf("the holder is %d", c.Holder())
	}
	if err := os.Chown(dir, 63210, 63210); err != nil {
		t.Fatal(err)
	}
	if c, err := diskctl.Open(t.Context(), dir, 0); err == nil || !strings.Contains(err.Error(), "belongs to user 63210") {
		t.Errorf("%v, %v", c, err)
	}
}
