// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestUnreadableOutputIsMadeAgain checks that an action runs again if the bucket finds its output but refuses to read
// it, as Amazon S3 does after access to the object's encryption key was revoked.
func TestUnreadableOutputIsMadeAgain(t *testing.T) {
	t.Parallel()
	confined(t)
	objects := s3mem.New()
	must.Succeed(t, objects.CreateBucket("cache"))
	store := gofakes3.New(objects, gofakes3.WithLogger(gofakes3.DiscardLog())).Server()
	var refused atomic.Pointer[string] // hash of a blob
	bucket := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if hash := refused.Load(); hash != nil && r.Method == http.MethodGet && strings.Contains(r.URL.Path, *hash) {
			w.WriteHeader(http.StatusForbidden)
			io.WriteString(w, "<Error><Code>AccessDenied</Code></Error>")
			return
		}
		store.ServeHTTP(w, r)
	}))
	t.Cleanup(bucket.Close)
	empty := func() *client { // with an empty local store
		return serveAs(t, bazelrun.ServerConfig{
			Dir: filepath.Join(t.TempDir(), "store"), Args: []string{"--store", "s3://cache?endpoint=" + bucket.URL},
			Env: []string{"AWS_ACCESS_KEY_ID=a", "AWS_SECRET_ACCESS_KEY=b"},
		})
	}
	first := empty()
	d := first.prepare(job{script: "echo a > out", outputs: []string{"out"}})
	_, result := first.wantSuccess("the first run", first.request(d, nil))
	out := result.OutputFiles[0].Digest
	refused.Store(&out.Hash)
	second := empty()
	cached := second.wantResult("with the output", second.request(d, nil))
	expect.That(t, cached.CachedResult, "the action ran again before its output was read")
	_, err := second.download(out)
	expect.Equal(t, status.Code(err), codes.NotFound, "the output")
	again := second.wantResult("without the output", second.request(d, nil))
	expect.That(t, !again.CachedResult, "the result without its output was reused")
	expect.Equal(t, second.get(out), "a\n", "output of the second run")
}
