// SPDX-License-Identifier: Apache-2.0

package object_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/object"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/minio/minio-go/v7"
)

func TestMain(m *testing.M) {
	// Retry without waiting.
	minio.DefaultRetryUnit, minio.DefaultRetryCap = time.Millisecond, time.Millisecond
	for _, name := range []string{
		"AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_SESSION_TOKEN",
		"GOOGLE_APPLICATION_CREDENTIALS",
	} {
		os.Unsetenv(name)
	}
	os.Setenv("AWS_ACCESS_KEY_ID", accessKey)
	os.Setenv("AWS_SECRET_ACCESS_KEY", "not a real secret")
	os.Exit(m.Run())
}

const (
	accessKey  = "AKIDEXAMPLE"
	bucketName = "farm-cache"
)

var schemes = []string{"s3", "gs"}

// A server keeps objects in memory. It adds to an S3 fake what that does not check: signatures and checksums of Amazon,
// headers and tokens of Google.
type server struct {
	scheme  string
	address string // http://HOST:PORT
	objects *s3mem.Backend
	store   http.Handler
	token   string // required of Google requests; "" for none
	ca      string // file of the authority of its certificate; "" without TLS

	mu         sync.Mutex
	faults     faults
	calls      map[string]int // by kind
	busy, most int            // concurrent requests, now and at most
}

// faults are injected into requests; the zero value injects none.
type faults struct {
	// before may respond to the nth request of a kind, counted from 1, and then returns true.
	before func(w http.ResponseWriter, r *http.Request, kind string, n int) bool
	// damage changes a request body in transit.
	damage func(kind string, b []byte) []byte
	// breakAt is the number of bytes after which the first breaks downloads break off.
	breakAt, breaks int
}

// spoil injects faults, and resets the counters.
func (s *server) spoil(f faults) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults, s.most = f, 0
	clear(s.calls)
}

// serve starts a server with an empty bucket.
func serve(t *testing.T, scheme string) *server {
	t.Helper()
	s := newServer(t, scheme)
	s.listen(t, (*httptest.Server).Start)
	return s
}

// listen starts a web server for s.
func (s *server) listen(t *testing.T, start func(*httptest.Server)) *httptest.Server {
	web := httptest.NewUnstartedServer(s)
	web.Config.ErrorLog = log.New(io.Discard, "", 0) // ignore broken connections
	start(web)
	t.Cleanup(web.Close)
	s.address = web.URL
	return web
}

func newServer(t *testing.T, scheme string) *server {
	t.Helper()
	s := &server{scheme: scheme, objects: s3mem.New(), calls: map[string]int{}}
	s.store = gofakes3.New(s.objects, gofakes3.WithLogger(gofakes3.DiscardLog())).Server()
	must.Succeed(t, s.objects.CreateBucket(bucketName))
	return s
}

// url returns the URL of the bucket, with more added to its query.
func (s *server) url(more string) string {
	if s.ca != "" {
		more += "&ca=" + s.ca
	}
	return s.scheme + "://" + bucketName + "/team/one?endpoint=" + s.address + more
}

func (s *server) open(t *testing.T, cfg object.Config) *object.Client {
	t.Helper()
	if cfg.URL == "" {
		cfg.URL = s.url("")
	}
	c := must.Get(object.Open(t.Context(), cfg))(t)
	t.Cleanup(func() { c.Close() })
	return c
}

// instance returns the instance "".
func (s *server) instance(t *testing.T) *object.Store {
	t.Helper()
	return named(t, s.open(t, object.Config{}), "")
}

func named(t *testing.T, c *object.Client, name string) *object.Store {
	t.Helper()
	return must.Get(c.Store(name))(t)
}

// kind returns the kind of a request.
func kind(r *http.Request) string {
	q := r.URL.Query()
	switch {
	case strings.HasSuffix(r.URL.Path, "/absent"):
		return "probe"
	case q.Has("uploads"):
		return "begin"
	case q.Has("partNumber"):
		return "part"
	case q.Has("uploadId") && r.Method == http.MethodPost:
		return "complete"
	case q.Has("uploadId"):
		return "abort"
	case r.Header.Get("X-Amz-Copy-Source")+r.Header.Get("X-Goog-Copy-Source") != "":
		return "copy"
	}
	return r.Method
}

// count counts a request, and returns its number and the faults.
func (s *server) count(kind string) (int, faults) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[kind]++
	s.busy++
	s.most = max(s.most, s.busy)
	return s.calls[kind], s.faults
}

func (s *server) called(kind string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[kind]
}

func refuse(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	io.WriteString(w, "<Error><Code>"+code+"</Code><Message>"+message+"</Message></Error>")
}

// ServeHTTP implements http.Handler.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	what := kind(r)
	n, f := s.count(what)
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.busy--
	}()
	if f.before != nil && f.before(w, r, what, n) {
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client went away
	}
	if f.damage != nil {
		body = f.damage(what, body)
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	if s.scheme == "gs" {
		amazon := http.Header{}
		for name, values := range r.Header {
			if strings.HasPrefix(name, "X-Amz-") {
				refuse(w, 400, "ExcessHeaderValues", name+" is not a Google header")
				return
			}
			amazon[strings.Replace(name, "X-Goog-", "X-Amz-", 1)] = values
		}
		r.Header = amazon
		bearer := ""
		if s.token != "" {
			bearer = "Bearer " + s.token
		}
		switch {
		case r.Header.Get("Authorization") != bearer:
			refuse(w, 401, "AuthenticationRequired", "authorization is "+r.Header.Get("Authorization"))
			return
		case (what == "PUT" || what == "part") && r.Header.Get("Content-Md5") == "":
			refuse(w, 400, "InvalidDigest", "no checksum")
			return
		}
	} else {
		sum := sha256.Sum256(body)
		switch stated := r.Header.Get("X-Amz-Content-Sha256"); {
		case !strings.HasPrefix(r.Header.Get("Authorization"), "AWS4-HMAC-SHA256 Credential="+accessKey+"/"):
			refuse(w, 403, "AccessDenied", "authorization is "+r.Header.Get("Authorization"))
			return
		case (what == "PUT" || what == "part") && r.Header.Get("Content-Md5") == "":
			refuse(w, 400, "InvalidRequest", "Content-MD5 is required with object lock")
			return
		case len(body) > 0 && stated != hex.EncodeToString(sum[:]):
			refuse(w, 400, "XAmzContentSHA256Mismatch", "the body does not match "+stated)
			return
		}
	}
	if what == "copy" && r.Header.Get("X-Amz-Metadata-Directive") != "REPLACE" {
		refuse(w, 400, "InvalidRequest", "a copy onto itself changes nothing")
		return
	}
	if what == "GET" && n <= f.breaks {
		w = &breaking{ResponseWriter: w, left: f.breakAt}
	}
	s.store.ServeHTTP(w, r)
}

// breaking is a response that breaks off.
type breaking struct {
	http.ResponseWriter
	left int
}

func (b *breaking) Write(p []byte) (int, error) {
	if len(p) > b.left {
		b.ResponseWriter.Write(p[:b.left])
		b.ResponseWriter.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
	b.left -= len(p)
	return b.ResponseWriter.Write(p)
}

// keys returns the keys of all objects.
func (s *server) keys(t *testing.T) []string {
	t.Helper()
	list := must.Get(s.objects.ListBucket(bucketName, nil, gofakes3.ListBucketPage{}))(t)
	var keys []string
	for _, o := range list.Contents {
		keys = append(keys, o.Key)
	}
	return keys
}

// uploads returns the number of multipart uploads that are neither complete nor aborted.
func (s *server) uploads(t *testing.T) int {
	t.Helper()
	w := httptest.NewRecorder()
	s.store.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/"+bucketName+"?uploads", nil))
	must.Be(t, w.Code == http.StatusOK || strings.Contains(w.Body.String(), "NoSuchUpload"),
		"list uploads: %d %s", w.Code, w.Body)
	return strings.Count(w.Body.String(), "<Upload>")
}

// only returns the key of the only object.
func (s *server) only(t *testing.T) string {
	t.Helper()
	keys := s.keys(t)
	must.Be(t, len(keys) == 1, "the bucket has the objects %q, want one", keys)
	return keys[0]
}

// replace replaces the object of a key, with a modification time.
func (s *server) replace(t *testing.T, key string, content []byte, at time.Time) {
	t.Helper()
	// The fake merges metadata with the old object, so delete that first.
	_, err1 := s.objects.DeleteObject(bucketName, key)
	_, err2 := s.objects.PutObject(bucketName, key,
		map[string]string{"Last-Modified": at.UTC().Format(http.TimeFormat)}, bytes.NewReader(content),
		int64(len(content)), nil)
	must.Succeed(t, errors.Join(err1, err2))
}

// content returns the content of an object.
func (s *server) content(t *testing.T, key string) []byte {
	t.Helper()
	o := must.Get(s.objects.GetObject(bucketName, key, nil))(t)
	defer o.Contents.Close()
	return must.Get(io.ReadAll(o.Contents))(t)
}

// put stores bytes and returns their digest.
func put(t *testing.T, s cas.Store, b []byte) cas.Digest {
	t.Helper()
	return must.Get(cas.PutBytes(t.Context(), s, cas.SHA256, b))(t)
}

// hang blocks until the client disconnects.
func hang(ctx context.Context) { <-ctx.Done() }
