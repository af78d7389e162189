// SPDX-License-Identifier: Apache-2.0

package blobs

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// TestUploadRejectsPipe: it returns at once instead of waiting for a writer.
func TestUploadRejectsPipe(t *testing.T) {
	in := must.Get(castest.Instances()(""))(t)
	pipe := filepath.Join(t.TempDir(), "pipe")
	must.Succeed(t, unix.Mkfifo(pipe, 0o600))
	if d, err := Upload(t.Context(), in.Store, cas.SHA256, pipe, nil, nil); err == nil || !strings.Contains(err.Error(), "neither a file nor a directory") {
		t.Errorf("got %v, %v", d, err)
	}
}
