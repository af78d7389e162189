// SPDX-License-Identifier: Apache-2.0

package object_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"
	"unicode"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/object"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
)

// both runs a test for S3 and for Google.
func both(t *testing.T, test func(t *testing.T, s *server)) {
	for _, scheme := range schemes {
		t.Run(scheme, func(t *testing.T) {
			t.Parallel()
			test(t, serve(t, scheme))
		})
	}
}

func TestContract(t *testing.T) {
	for _, scheme := range schemes {
		t.Run(scheme, func(t *testing.T) {
			t.Parallel()
			castest.TestStore(t, func(t *testing.T) cas.Store { return serve(t, scheme).instance(t) })
			castest.TestActionCache(t, func(t *testing.T) cas.ActionCache { return serve(t, scheme).instance(t) })
		})
	}
}

func TestLargeBlobsGoInParts(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		store := s.instance(t)
		for i, size := range []int{16 << 20, 16<<20 + 1, 48 << 20} {
			b, d := castest.Blob(byte(i), size)
			s.spoil(faults{})
			must.Succeed(t, store.Put(t.Context(), d, iotest.DataErrReader(bytes.NewReader(b))))
			expect.Equal(t, s.called("part"), []int{0, 2, 3}[i], "parts of %d bytes", size)
			for _, off := range []int64{0, 16 << 20} {
				r := must.Get(store.Open(t.Context(), d, off))(t)
				got, err := io.ReadAll(r)
				r.Close()
				expect.That(t, err == nil && bytes.Equal(got, b[off:]),
					"%d bytes from %d: got %d bytes, %v", size, off, len(got), err)
			}
		}
		expect.Equal(t, s.uploads(t), 0, "uploads are unfinished")
	})
}

// TestFailedPutLeavesNothing checks that a failed Put leaves neither an object nor parts.
func TestFailedPutLeavesNothing(t *testing.T) {
	errBroken := errors.New("broken")
	both(t, func(t *testing.T, s *server) {
		store := s.instance(t)
		for _, size := range []int{1000, 40 << 20} {
			b, d := castest.Blob(1, size)
			flipped := bytes.Clone(b)
			flipped[size-1] ^= 1
			for name, c := range map[string]struct {
				r    io.Reader
				want error
			}{
				"flipped last bit":  {bytes.NewReader(flipped), cas.ErrMismatch},
				"one byte less":     {bytes.NewReader(b[:size-1]), cas.ErrMismatch},
				"one byte more":     {io.MultiReader(bytes.NewReader(b), strings.NewReader("x")), cas.ErrMismatch},
				"broken at the end": {io.MultiReader(bytes.NewReader(b), iotest.ErrReader(errBroken)), errBroken},
				"broken in the middle": {
					io.MultiReader(bytes.NewReader(b[:size/2]), iotest.ErrReader(errBroken)),
					errBroken,
				},
			} {
				s.spoil(faults{})
				expect.Error(t, store.Put(t.Context(), d, c.r), c.want, "%d bytes, %s", size, name)
				if keys, n := s.keys(t), s.uploads(t); len(keys) > 0 || n > 0 || s.called("complete") > 0 {
					t.Errorf("%d bytes, %s: objects %q, %d uploads, %d completed", size, name, keys, n,
						s.called("complete"))
				}
			}
		}
		// Parts are removed after a cancellation, too.
		b, d := castest.Blob(2, 40<<20)
		ctx, cancel := context.WithCancel(t.Context())
		s.spoil(faults{before: func(_ http.ResponseWriter, _ *http.Request, kind string, n int) bool {
			if kind == "part" && n == 2 {
				cancel()
			}
			return false
		}})
		expect.Error(t, store.Put(ctx, d, bytes.NewReader(b)), context.Canceled, "cancelled")
		if keys, n := s.keys(t), s.uploads(t); len(keys) > 0 || n > 0 || s.called("begin") != 1 {
			t.Errorf("cancelled: objects %q, %d uploads of %d", keys, n, s.called("begin"))
		}
	})
}

// TestUploadsHaveChecksums checks that the server rejects uploads damaged in transit.
func TestUploadsHaveChecksums(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		store := s.instance(t)
		s.spoil(faults{damage: func(kind string, b []byte) []byte {
			if kind == "PUT" || kind == "part" {
				b = bytes.Clone(b)
				b[len(b)/2] ^= 1
			}
			return b
		}})
		for _, size := range []int{1000, 17 << 20} {
			b, d := castest.Blob(1, size)
			expect.That(t, store.Put(t.Context(), d, bytes.NewReader(b)) != nil, "%d bytes: got no error", size)
		}
		expect.That(t, store.Record(t.Context(), cas.SHA256.Sum(nil), &repb.ActionResult{ExitCode: 1}) != nil,
			"a result: got no error")
		if keys, n := s.keys(t), s.uploads(t); len(keys) > 0 || n > 0 {
			t.Errorf("objects %q, %d uploads", keys, n)
		}
	})
}

func TestPutRejectsBlobAboveObjectSize(t *testing.T) {
	s := serve(t, "s3")
	store := s.instance(t)
	_, small := castest.Blob(1, 100)
	d := must.Get(cas.NewDigest(cas.SHA256, small.Hash(), 10_000*16<<20+1))(t)
	if err := store.Put(t.Context(), d, iotest.ErrReader(errors.New("read"))); !errors.Is(err, cas.ErrUpstreamFull) ||
		!errors.Is(err, errors.ErrUnsupported) || s.called("begin") != 0 {
		t.Errorf("got %v after %d uploads, want ErrUpstreamFull before any", err, s.called("begin"))
	}
}

// TestKeys checks the keys of instances, which must not contain paths chosen by clients.
func TestKeys(t *testing.T) {
	s := serve(t, "s3")
	c := s.open(t, object.Config{})
	hash := cas.SHA256.Sum([]byte("x")).Hash()
	names := map[string]string{
		"": "!", "main": "main", "a/b": "a!2fb", "../../other": "!2e!2e!2f!2e!2e!2fother",
		"A b\n\u202e": "!41!20b!0a!e2!80!ae",
		"!":           "!21", "!2f": "!212f", "team/one": "team!2fone",
		strings.Repeat("/a", 50)[1:]: strings.Repeat("!2fa", 50)[3:],
		strings.Repeat("a", 256):     "!!" + cas.SHA256.Sum([]byte(strings.Repeat("a", 256))).Hash(),
	}
	var want []string
	for name, part := range names {
		in := must.Get(c.Instance(name))(t)
		if missing, err := in.Store.Missing(t.Context(), []cas.Digest{cas.SHA256.Sum([]byte("x"))}); err != nil ||
			len(missing) != 1 {
			t.Errorf("%q: got %v missing, %v; want the blob of another instance missing", name, missing, err)
		}
		d := put(t, in.Store, []byte("x"))
		must.Succeed(t, in.Actions.Record(t.Context(), d, &repb.ActionResult{}))
		want = append(want, "team/one/"+part+"/blobs/sha256/"+hash+"-1", "team/one/"+part+"/results/sha256/"+hash+"-1")
	}
	got := s.keys(t)
	slices.Sort(got)
	slices.Sort(want)
	expect.Slices(t, got, want)
	for _, name := range []string{"blobs", "a//b", strings.Repeat("a", 257)} {
		expect.Error(t, expect.Err(c.Instance(name)), cas.ErrInvalid, "%.20q", name)
	}
}

// TestDamagedBlob checks that damage is detected by a read, reported once, and repaired by the next Put. Until then the
// blob is absent.
func TestDamagedBlob(t *testing.T) {
	b, d := castest.Blob(1, 100_000)
	for name, damaged := range map[string][]byte{
		"one bit": append([]byte{b[0] ^ 1}, b[1:]...), "cut off": b[:50_000], "nothing": nil,
		"longer": append(bytes.Clone(b), 0),
	} {
		both(t, func(t *testing.T, s *server) {
			var reported []string
			c := s.open(t, object.Config{URL: s.url(""), Corrupt: func(instance string, d cas.Digest, where string) {
				reported = append(reported, fmt.Sprint(instance, " ", d, " ", where))
			}})
			store := named(t, c, "main")
			put(t, store, b)
			key := s.only(t)
			s.replace(t, key, damaged, time.Now())
			// A wrong size is detected without a read.
			if missing, err := store.Missing(t.Context(), []cas.Digest{d}); err != nil ||
				(len(missing) == 1) != (name != "one bit") {
				t.Errorf("%s, before a read: got %v, %v", name, missing, err)
			}
			for range 2 {
				expect.Error(t, expect.Err(cas.ReadAll(t.Context(), store, d, 1<<20)), cas.ErrCorrupt, "%s: read", name)
			}
			if r, err := store.Open(t.Context(), d, 60_000); name != "one bit" && !errors.Is(err, cas.ErrCorrupt) {
				t.Errorf("%s: read from 60000: got %v, %v, want ErrCorrupt", name, r, err)
			}
			expect.Slices(t, reported, []string{fmt.Sprint("main ", d, " ", key)}, "%s: reported", name)
			to := castest.NewMemory()
			if _, err := store.Fetch(t.Context(), to, []cas.Digest{d}); err == nil || to.Len() != 0 {
				t.Errorf("%s: Fetch: got %v and %d blobs", name, err, to.Len())
			}
			expect.Equal(t, len(must.Get(store.Missing(t.Context(), []cas.Digest{d}))(t)), 1, "%s", name)
			put(t, store, b)
			expect.Equal(t, len(must.Get(store.Missing(t.Context(), []cas.Digest{d}))(t)), 0, "%s, after Put", name)
			expect.Equal(t, string(must.Get(cas.ReadAll(t.Context(), store, d, 1<<20))(t)), string(b), "%s, after Put",
				name)
			// Another process may have repaired it.
			s.replace(t, key, append([]byte{b[0] ^ 1}, b[1:]...), time.Now())
			expect.Error(t, expect.Err(cas.ReadAll(t.Context(), store, d, 1<<20)), cas.ErrCorrupt, "%s, damaged again",
				name)
			s.replace(t, key, b, time.Now())
			must.Get(cas.ReadAll(t.Context(), store, d, 1<<20))(t)
			expect.Equal(t, len(must.Get(store.Missing(t.Context(), []cas.Digest{d}))(t)), 0, "%s, repaired by another",
				name)
		})
	}
}

// TestDamagedBlobsAreBounded checks that the memory for damaged blobs does not grow with their number.
func TestDamagedBlobsAreBounded(t *testing.T) {
	c := serve(t, "s3").open(t, object.Config{})
	store := named(t, c, "")
	for i := range object.MaxDamaged + 100 {
		store.SetDamaged(cas.SHA256.Sum(fmt.Append(nil, i)))
	}
	expect.Equal(t, c.Damaged(), object.MaxDamaged, "damaged blobs")
}

func TestDamagedResult(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		store := s.instance(t)
		_, action := castest.Blob(1, 100)
		record := func() {
			must.Succeed(t, store.Record(t.Context(), action, &repb.ActionResult{
				StdoutRaw: []byte("hello"),
				ExitCode:  3,
			}))
		}
		record()
		key := s.only(t)
		b := s.content(t, key)
		for name, damaged := range map[string][]byte{
			"one bit": append(bytes.Clone(b[:len(b)-1]), b[len(b)-1]^1), "cut off": b[:len(b)-1], "nothing": nil,
			"no sum": b[32:], "longer": append(bytes.Clone(b), 0),
		} {
			s.replace(t, key, damaged, time.Now())
			expect.Error(t, expect.Err(store.Lookup(t.Context(), action)), cas.ErrNotFound, "%s", name)
			record()
			expect.Equal(t, must.Get(store.Lookup(t.Context(), action))(t).ExitCode, 3, "%s, after Record", name)
		}
	})
}

// calls returns each call of a store, for present and absent blobs.
func calls(store *object.Store, present cas.Digest) map[string]func(context.Context) error {
	b, absent := castest.Blob(7, 1000)
	large, largeDigest := castest.Blob(8, 17<<20)
	return map[string]func(context.Context) error{
		"Missing": func(ctx context.Context) error { _, err := store.Missing(ctx, []cas.Digest{present}); return err },
		"Open":    func(ctx context.Context) error { _, err := store.Open(ctx, present, 0); return err },
		"Open at the end": func(ctx context.Context) error {
			_, err := store.Open(ctx, present, present.Size())
			return err
		},
		"Put":          func(ctx context.Context) error { return store.Put(ctx, absent, bytes.NewReader(b)) },
		"Put of parts": func(ctx context.Context) error { return store.Put(ctx, largeDigest, bytes.NewReader(large)) },
		"PutAll": func(ctx context.Context) error {
			return errors.Join(store.PutAll(ctx, []cas.Blob{{Digest: absent, Data: b}})...)
		},
		"Lookup": func(ctx context.Context) error { _, err := store.Lookup(ctx, present); return err },
		"Record": func(ctx context.Context) error { return store.Record(ctx, present, &repb.ActionResult{}) },
		"Check":  store.Check,
		"Fetch": func(ctx context.Context) error {
			_, err := store.Fetch(ctx, castest.NewMemory(), []cas.Digest{present})
			return err
		},
	}
}

// TestArchivedBlobIsPutAgain: a bucket lists an object that a rule has archived, and refuses to read it.
func TestArchivedBlobIsPutAgain(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		store := s.instance(t)
		d := put(t, store, []byte("archived"))
		s.spoil(faults{before: func(w http.ResponseWriter, _ *http.Request, what string, _ int) bool {
			if what != "GET" {
				return false
			}
			refuse(w, 403, "InvalidObjectState", "The operation is not valid for the object's storage class")
			return true
		}})
		_, err := store.Open(t.Context(), d, 0)
		if !errors.Is(err, cas.ErrCorrupt) || !strings.Contains(err.Error(), "archived") {
			t.Errorf("got %v, want ErrCorrupt that says why", err)
		}
		wantPutAgain(t, s, store, []byte("archived"))
	})
}

// wantPutAgain checks that a blob is missing until it is put again, when s has no faults any more.
func wantPutAgain(t *testing.T, s *server, store cas.Store, data []byte) {
	t.Helper()
	d := cas.SHA256.Sum(data)
	missing, err := store.Missing(t.Context(), []cas.Digest{d})
	expect.That(t, err == nil && len(missing) == 1, "got missing %v, %v, want the blob", missing, err)
	s.spoil(faults{})
	put(t, store, data)
	missing, err = store.Missing(t.Context(), []cas.Digest{d})
	expect.That(t, err == nil && len(missing) == 0, "put again: got missing %v, %v, want none", missing, err)
}

// TestRefusedObjectIsPutAgain: a bucket finds an object but refuses reads of this object only, as Amazon S3 does after
// access to its encryption key was revoked.
func TestRefusedObjectIsPutAgain(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		store := s.instance(t)
		d := put(t, store, []byte("refused"))
		s.spoil(faults{before: func(w http.ResponseWriter, _ *http.Request, what string, _ int) bool {
			if what == "GET" {
				refuse(w, 403, "AccessDenied", "kms:Decrypt is not allowed")
			}
			return what == "GET"
		}})
		for _, off := range []int64{0, 3} {
			_, err := store.Open(t.Context(), d, off)
			expect.That(t, errors.Is(err, cas.ErrCorrupt) && !errors.Is(err, cas.ErrDenied),
				"offset %d: got %v, want only ErrCorrupt", off, err)
			expect.Message(t, err, "kms:Decrypt")
		}
		expect.Error(t, store.Err(), nil, "the bucket")
		wantPutAgain(t, s, store, []byte("refused"))
	})
}

// TestRefusedCredentialsAreNoDamage checks that an object does not count as damaged when the bucket refuses the
// credentials or the clock of a single read.
func TestRefusedCredentialsAreNoDamage(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		store := s.instance(t)
		d := put(t, store, []byte("intact"))
		for code, status := range map[string]int{
			"ExpiredToken": 400, "RequestTimeTooSkewed": 403, "InvalidAccessKeyId": 403, "SignatureDoesNotMatch": 403,
		} {
			s.spoil(faults{before: func(w http.ResponseWriter, _ *http.Request, what string, _ int) bool {
				if what == "GET" {
					refuse(w, status, code, "")
				}
				return what == "GET"
			}})
			_, err := store.Open(t.Context(), d, 0)
			expect.Error(t, err, cas.ErrDenied, "%s", code)
			expect.Equal(t, store.Damaged(), 0, "%s: damaged blobs", code)
		}
	})
}

// TestServerErrors checks the kind and the advice of errors, and that they quote the server in one printable line.
func TestServerErrors(t *testing.T) {
	const hostile = "\x1b[2J\u202e\n\r"
	both(t, func(t *testing.T, s *server) {
		store := s.instance(t)
		present := put(t, store, []byte("present"))
		must.Succeed(t, store.Record(t.Context(), present, &repb.ActionResult{}))
		grant := map[string]string{"s3": "s3:AbortMultipartUpload and s3:ListBucket on bucket " + bucketName, "gs": "objectUser"}[s.scheme]
		for _, c := range []struct {
			status int
			code   string
			want   error
			grpc   codes.Code
			text   string // in the error of every response with a body
		}{
			{500, "InternalError", cas.ErrUnavailable, codes.Unavailable, "InternalError"},
			{503, "SlowDown", cas.ErrUnavailable, codes.Unavailable, "SlowDown"},
			{502, "BadGateway", cas.ErrUnavailable, codes.Unavailable, "BadGateway"},
			{429, "TooManyRequests", cas.ErrUnavailable, codes.Unavailable, "TooManyRequests"},
			{403, "AccessDenied", cas.ErrDenied, codes.FailedPrecondition, grant},
			{403, "SignatureDoesNotMatch", os.ErrPermission, codes.FailedPrecondition, "check the credentials"},
			{401, "AuthenticationRequired", cas.ErrDenied, codes.FailedPrecondition, "check the credentials"},
			{400, "ExpiredToken", cas.ErrDenied, codes.FailedPrecondition, "renew the temporary credentials"},
			{400, "InvalidToken", cas.ErrDenied, codes.FailedPrecondition, "renew the temporary credentials"},
			{501, "NotImplemented", nil, codes.Internal, "NotImplemented"},
			{507, "XMinioStorageFull", cas.ErrUpstreamFull, codes.ResourceExhausted, "raise its quota"},
			{400, "XMinioAdminBucketQuotaExceeded", cas.ErrUpstreamFull, codes.ResourceExhausted, "Quota"},
			{404, "NoSuchBucket", object.ErrNoBucket, codes.Internal, "correct its name"},
		} {
			for call := range calls(store, present) {
				// A client that has found the bucket to be down would not call it.
				s.spoil(faults{})
				client := s.open(t, object.Config{})
				f := calls(named(t, client, ""), present)[call]
				s.spoil(faults{before: func(w http.ResponseWriter, r *http.Request, _ string, _ int) bool {
					refuse(w, c.status, c.code, strings.ReplaceAll(hostile, "\x1b", "&#x9b;")+strings.Repeat("long ", 1000))
					return true
				}})
				err := f(t.Context())
				must.Succeed(t, client.Close())
				// A response to HEAD has no body.
				head := call == "Missing" || call == "Open at the end"
				if head && c.code == "NoSuchBucket" || call == "Check" && c.want == cas.ErrUpstreamFull {
					continue
				}
				if c.want == nil && errors.Is(err, cas.ErrUnavailable) || c.want != nil && !errors.Is(err, c.want) ||
					casstatus.Code(err) != c.grpc || errors.Is(err, cas.ErrFull) || !head && !strings.Contains(err.Error(), c.text) {
					t.Errorf("%d %s: %s: got %v, want %v with %q", c.status, c.code, call, err, c.want, c.text)
				}
				if err == nil || !strings.Contains(err.Error(), s.scheme+"://"+bucketName+"/team/one/") ||
					len(err.Error()) > 5000 ||
					strings.ContainsFunc(err.Error(), func(r rune) bool { return !unicode.IsPrint(r) }) {
					t.Errorf("%d %s: %s: got %q, want a printable line with the bucket", c.status, c.code, call, err)
				}
			}
		}
	})
}

// TestTooLargeRequestIsUnsupported checks that an upload above a size limit of the server or of a proxy fails as
// unsupported and is not retried.
func TestTooLargeRequestIsUnsupported(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		store := s.instance(t)
		for kind, size := range map[string]int{"PUT": 1000, "part": 17 << 20} {
			for code, status := range map[string]int{"EntityTooLarge": 400, "": 413} {
				s.spoil(faults{before: func(w http.ResponseWriter, r *http.Request, what string, _ int) bool {
					if what != kind {
						return false
					}
					io.Copy(io.Discard, r.Body)
					refuse(w, status, code, "")
					return true
				}})
				data, d := castest.Blob(1, size)
				err := store.Put(t.Context(), d, bytes.NewReader(data))
				expect.That(t, errors.Is(err, cas.ErrUpstreamFull) && errors.Is(err, errors.ErrUnsupported),
					"%d bytes, %d %s: got %v, want ErrUpstreamFull and ErrUnsupported", size, status, code, err)
				expect.Equal(t, s.called(kind), 1, "requests")
			}
		}
	})
}

// TestThrottlingIsNotDamage checks that a refused read is only blamed on the bucket's load if the bucket says so.
func TestThrottlingIsNotDamage(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		store := s.instance(t)
		present := put(t, store, []byte("present"))
		for _, c := range []struct {
			status    int
			code      string
			throttled bool
		}{
			{503, "SlowDown", true},
			{429, "TooManyRequests", true},
			{429, "", true},
			{503, "SlowDownRead", false}, // of MinIO, for a damaged object
			{503, "ServiceUnavailable", false},
			{500, "InternalError", false},
		} {
			s.spoil(faults{before: func(w http.ResponseWriter, _ *http.Request, kind string, _ int) bool {
				if kind == "GET" {
					refuse(w, c.status, c.code, "")
				}
				return kind == "GET"
			}})
			_, err := store.Open(t.Context(), present, 0)
			expect.That(t, errors.Is(err, cas.ErrUnavailable) && errors.Is(err, cas.ErrThrottled) == c.throttled,
				"%d %s: got %v, want ErrUnavailable, and ErrThrottled: %v", c.status, c.code, err, c.throttled)
		}
	})
}

// TestTransientErrorsAreRetried checks that others are not.
func TestTransientErrorsAreRetried(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		store := s.instance(t)
		present := put(t, store, []byte("present"))
		must.Succeed(t, store.Record(t.Context(), present, &repb.ActionResult{}))
		var turn int
		var mu sync.Mutex
		s.spoil(faults{before: func(w http.ResponseWriter, _ *http.Request, kind string, n int) bool {
			if kind == "probe" { // also in the background, after an attempt without a response
				if n%2 == 1 {
					refuse(w, 503, "SlowDown", "")
				}
				return n%2 == 1
			}
			mu.Lock()
			defer mu.Unlock()
			turn++
			switch turn % 3 {
			case 1:
				refuse(w, 503, "SlowDown", "")
			case 2:
				panic(http.ErrAbortHandler)
			}
			return turn%3 != 0
		}})
		for call, f := range calls(store, present) {
			err := f(t.Context())
			expect.Error(t, err, nil, "%s", call)
		}
		for status, want := range map[int]int{403: 1, 503: 5} {
			s.spoil(faults{before: func(w http.ResponseWriter, _ *http.Request, kind string, _ int) bool {
				if kind == "GET" { // after a failed probe there are no further attempts
					refuse(w, status, "Refused", "")
				}
				return kind == "GET"
			}})
			if _, err := store.Lookup(t.Context(), present); err == nil || s.called("GET") != want {
				t.Errorf("%d: %v after %d calls, want %d", status, err, s.called("GET"), want)
			}
		}
	})
}

func TestUnreachableServerIsUnavailable(t *testing.T) {
	const nobody = "127.0.0.1:1"
	both(t, func(t *testing.T, s *server) {
		store := s.instance(t)
		present := put(t, store, []byte("present"))
		s.spoil(faults{before: func(http.ResponseWriter, *http.Request, string,
			int,
		) bool {
			panic(http.ErrAbortHandler)
		}})
		for call, f := range calls(store, present) {
			err := f(t.Context())
			expect.Error(t, err, cas.ErrUnavailable, "%s", call)
		}
		if _, err := object.Open(t.Context(), object.Config{URL: s.scheme + "://" + bucketName + "?endpoint=http://" +
			nobody}); !errors.Is(err, cas.ErrUnavailable) || !strings.Contains(err.Error(), nobody) {
			t.Errorf("Open: got %v, want ErrUnavailable with the address", err)
		}
		if _, err := object.Open(t.Context(), object.Config{URL: s.scheme + "://no-such-bucket?endpoint=" +
			s.address}); !errors.Is(err, cas.ErrUnavailable) {
			t.Errorf("Open: got %v, want ErrUnavailable", err)
		}
		s.spoil(faults{})
		if _, err := object.Open(t.Context(), object.Config{URL: s.scheme + "://no-such-bucket?endpoint=" +
			s.address}); !errors.Is(err, object.ErrNoBucket) {
			t.Errorf("Open: got %v, want ErrNoBucket", err)
		}
	})
}

// TestContextEndsEveryCall covers a server that does not respond, or stops in the middle.
func TestContextEndsEveryCall(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		store := s.instance(t)
		b, _ := castest.Blob(1, 10<<20)
		present := put(t, store, b)
		ctx, cancel := context.WithCancel(t.Context())
		r := must.Get(store.Open(ctx, present, 0))(t)
		must.Get(io.ReadFull(r, b[:1<<20]))(t)
		cancel()
		expect.Error(t, expect.Err(io.Copy(io.Discard, r)), context.Canceled, "the rest of a blob")
		r.Close()

		var waiting atomic.Pointer[context.CancelFunc]
		s.spoil(faults{before: func(_ http.ResponseWriter, r *http.Request, kind string, _ int) bool {
			// Cancel the call as soon as it waits.
			(*waiting.Load())()
			if kind == "abort" {
				return false
			}
			io.Copy(io.Discard, r.Body) // so that the server notices the cancellation
			hang(r.Context())
			return true
		}})
		all := calls(store, present)
		all["object.Open"] = func(ctx context.Context) error {
			_, err := object.Open(ctx, object.Config{URL: s.url("")})
			return err
		}
		for call, f := range all {
			ctx, cancel := context.WithCancel(t.Context())
			waiting.Store(&cancel)
			expect.Error(t, f(ctx), context.Canceled, "%s", call)
			cancel()
		}
	})
}

// TestFailedAbortIsReported checks that the error of an upload in parts mentions parts that are left, and keeps its kind.
func TestFailedAbortIsReported(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		store := s.instance(t)
		b, d := castest.Blob(1, 17<<20)
		b[len(b)-1]++
		for code, want := range map[string]bool{"": false, "NoSuchUpload": false, "AccessDenied": true} {
			s.spoil(faults{before: func(w http.ResponseWriter, _ *http.Request, kind string, _ int) bool {
				if kind == "abort" && code != "" {
					refuse(w, 403, code, "")
				}
				return kind == "abort" && code != ""
			}})
			err := store.Put(t.Context(), d, bytes.NewReader(b))
			expect.Error(t, err, cas.ErrMismatch)
			expect.That(t, !errors.Is(err, cas.ErrDenied), "got %v, want no ErrDenied", err)
			expect.Equal(t, strings.Contains(err.Error(), "parts stay in the bucket"), want, "abort: %q: %v", code, err)
		}
	})
}

// TestBrokenDownloadsAreResumed checks that downloads resume at their offset, with limited attempts.
func TestBrokenDownloadsAreResumed(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		store := s.instance(t)
		b, d := castest.Blob(1, 5<<20)
		put(t, store, b)
		for _, off := range []int64{0, 12345} {
			s.spoil(faults{breakAt: 1 << 20, breaks: 3})
			r := must.Get(store.Open(t.Context(), d, off))(t)
			got, err := io.ReadAll(r)
			r.Close()
			expect.That(t, err == nil && bytes.Equal(got, b[off:]) && s.called("GET") == 4,
				"from %d: %d bytes, %v, after %d calls", off, len(got), err, s.called("GET"))
		}
		s.spoil(faults{breakAt: 0, breaks: 1000})
		if _, err := cas.ReadAll(t.Context(), store, d, 5<<20); !errors.Is(err, cas.ErrUnavailable) ||
			s.called("GET") != 5 {
			t.Errorf("without progress: got %v after %d calls, want ErrUnavailable after 5", err, s.called("GET"))
		}
		s.spoil(faults{before: func(w http.ResponseWriter, r *http.Request, _ string, _ int) bool {
			if r.Method == http.MethodGet {
				w.Header().Set("Last-Modified", time.Now().UTC().Format(http.TimeFormat))
				w.(http.Flusher).Flush()
			}
			return r.Method == http.MethodGet
		}})
		expect.Error(t, expect.Err(store.Open(t.Context(), d, 0)), cas.ErrUnavailable, "response without a length")
		// An unreadable blob is not damaged.
		expect.Equal(t, len(must.Get(store.Missing(t.Context(), []cas.Digest{d}))(t)), 0)
		// The object is deleted during the download.
		s.spoil(faults{breakAt: 1 << 20, breaks: 1})
		r := must.Get(store.Open(t.Context(), d, 0))(t)
		defer r.Close()
		must.Get(s.objects.DeleteObject(bucketName, s.only(t)))(t)
		expect.Error(t, expect.Err(io.Copy(io.Discard, r)), cas.ErrNotFound, "deleted")
	})
}

// TestExpiringObjectsAreRenewed uses a lifecycle rule of ten days, so that objects are renewed after five.
func TestExpiringObjectsAreRenewed(t *testing.T) {
	const day = 24 * time.Hour
	both(t, func(t *testing.T, s *server) {
		store := named(t, s.open(t, object.Config{URL: s.url("&expire_days=10")}), "")
		forever := s.instance(t)
		b, d := castest.Blob(1, 1000)
		blob := "team/one/!/blobs/sha256/" + d.Hash() + "-1000"
		result := "team/one/!/results/sha256/" + d.Hash() + "-1000"
		put(t, store, b)
		must.Succeed(t, store.Record(t.Context(), d, &repb.ActionResult{ExitCode: 1}))
		recorded := s.content(t, result)
		use := map[string]func(store *object.Store) error{
			blob: func(store *object.Store) error {
				missing, err := store.Missing(t.Context(), []cas.Digest{d})
				expect.That(t, len(missing) == 0, "the blob is missing")
				return err
			},
			result: func(store *object.Store) error { _, err := store.Lookup(t.Context(), d); return err },
		}
		for key, content := range map[string][]byte{blob: b, result: recorded} {
			for _, c := range []struct {
				age    time.Duration
				store  *object.Store
				copied int
			}{
				{5*day - time.Hour, store, 0},
				{5*day + time.Hour, store, 1},
				{50 * day, forever, 0},
				{9 * day, store, 1},
			} {
				s.replace(t, key, content, time.Now().Add(-c.age))
				s.spoil(faults{})
				for range 2 {
					must.Succeed(t, use[key](c.store))
				}
				if n := s.called("copy"); n != c.copied || !bytes.Equal(s.content(t, key), content) {
					t.Errorf("%s at %v: copied %d times, want %d", key, c.age, n, c.copied)
				}
			}
			// A Put or Record renews it, too, without a query.
			s.replace(t, key, content, time.Now().Add(-9*day))
			put(t, store, b)
			must.Succeed(t, store.Record(t.Context(), d, &repb.ActionResult{ExitCode: 1}))
			s.spoil(faults{})
			if err := use[key](store); err != nil || s.called("copy") != 0 {
				t.Errorf("%s, stored again: got %v and %d copies", key, err, s.called("copy"))
			}
			// The object expires during the copy.
			s.replace(t, key, content, time.Now().Add(-9*day))
			s.spoil(faults{before: func(_ http.ResponseWriter, _ *http.Request, kind string, _ int) bool {
				if kind == "copy" {
					s.objects.DeleteObject(bucketName, key)
				}
				return false
			}})
			if key == result {
				expect.Error(t, expect.Err(store.Lookup(t.Context(), d)), cas.ErrNotFound, "deleted during the copy")
			} else if missing, err := store.Missing(t.Context(), []cas.Digest{d}); err != nil || len(missing) != 1 {
				t.Errorf("deleted during the copy: got %v, %v, want it missing", missing, err)
			}
			s.spoil(faults{})
		}
		// S3 cannot copy it, so it must be put again. Google can, but this server does not have it.
		d = must.Get(cas.NewDigest(cas.SHA256, d.Hash(), 5<<30+1))(t)
		s.spoil(faults{before: func(w http.ResponseWriter, r *http.Request, _ string, _ int) bool {
			if r.Method != http.MethodHead {
				return false
			}
			w.Header().Set("Content-Length", fmt.Sprint(d.Size()))
			w.Header().Set("Last-Modified", time.Now().Add(-6*day).UTC().Format(http.TimeFormat))
			return true
		}})
		for store, want := range map[*object.Store]int{store: 1, forever: 0} {
			expect.Equal(t, len(must.Get(store.Missing(t.Context(), []cas.Digest{d}))(t)), want, "5 GiB")
		}
		expect.Equal(t, s.called("copy") == 1, s.scheme == "gs", "5 GiB")
	})
}

// TestAbsentDoesNotRenew checks that Absent, which package overlay calls for queries, does not renew an old object.
func TestAbsentDoesNotRenew(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		c := s.open(t, object.Config{URL: s.url("&expire_days=10")})
		b, d := castest.Blob(1, 1000)
		_, absent := castest.Blob(2, 1000)
		put(t, named(t, c, ""), b)
		s.replace(t, s.only(t), b, time.Now().Add(-9*24*time.Hour))
		in := must.Get(c.Instance(""))(t).Store.(interface {
			cas.Renewer
			Absent(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error)
		})
		got := must.Get(in.Absent(t.Context(), []cas.Digest{d, absent, absent}))(t)
		expect.That(t, slices.Equal(got, []cas.Digest{absent}), "got %v absent, want %v", got, absent)
		expect.Equal(t, s.called("copy"), 0, "copies by a query")
		must.Get(in.Renew(t.Context(), []cas.Digest{d}))(t)
		expect.Equal(t, s.called("copy"), 1, "copies by Renew")
	})
}

// TestOneObjectDoesNotFailOthers checks that an object that the bucket cannot find, read or copy is missing, so that it
// is put again, and that a query for others does not fail because of it.
func TestOneObjectDoesNotFailOthers(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		store := named(t, s.open(t, object.Config{URL: s.url("&expire_days=10")}), "")
		var ds []cas.Digest
		key := func(d cas.Digest) string { return "team/one/!/blobs/sha256/" + d.Hash() + "-1000" }
		old := func() {
			for i := range ds {
				b, _ := castest.Blob(byte(i), 1000)
				s.replace(t, key(ds[i]), b, time.Now().Add(-6*24*time.Hour))
			}
		}
		for i := range 3 {
			b, d := castest.Blob(byte(i), 1000)
			put(t, store, b)
			ds = append(ds, d)
		}
		bad := ds[1]
		for _, c := range []struct {
			kinds   string
			status  int
			code    string
			missing bool
			want    error
		}{
			{"copy", 503, "SlowDownRead", true, nil},
			{"copy", 501, "NotImplemented", true, nil},
			{"copy", 400, "InvalidRequest", true, nil},
			{"copy", 403, "ObjectNotInActiveTierError", true, nil}, // it is archived
			{"copy", 503, "SlowDown", false, cas.ErrThrottled},
			{"copy", 403, "AccessDenied", true, nil}, // access to its encryption key was revoked
			{"copy", 403, "RequestTimeTooSkewed", false, cas.ErrDenied},
			{"copy", 507, "XMinioStorageFull", false, nil},
			{"copy", 400, "EntityTooLarge", true, nil},
			{"HEAD", 503, "SlowDownRead", false, nil},
			{"HEAD GET", 503, "SlowDownRead", true, nil},
			{"HEAD GET", 503, "SlowDown", false, cas.ErrThrottled},
			{"HEAD", 403, "AccessDenied", false, nil},
			{"HEAD GET", 403, "AccessDenied", true, nil}, // it has another owner
			{"HEAD GET", 403, "RequestTimeTooSkewed", false, cas.ErrDenied},
			{"HEAD GET copy probe", 503, "SlowDownRead", false, cas.ErrUnavailable},
		} {
			old()
			s.spoil(faults{before: func(w http.ResponseWriter, r *http.Request, kind string, _ int) bool {
				fails := slices.Contains(strings.Fields(c.kinds), kind) && (kind == "probe" || r.URL.Path == "/"+bucketName+"/"+key(bad))
				if fails {
					refuse(w, c.status, c.code, "")
				}
				return fails
			}})
			missing, err := store.Missing(t.Context(), ds)
			if !errors.Is(err, c.want) || err == nil && slices.Contains(missing, bad) != c.missing || len(missing) > 1 {
				t.Errorf("%s fails with %d %s: got %v, %v, want it missing: %t, %v", c.kinds, c.status, c.code, missing, err, c.missing, c.want)
			}
			if c.want == cas.ErrDenied { // for one object
				expect.Error(t, store.Check(t.Context()), nil, "the bucket")
			}
		}
	})
}

// TestDeniedCopies checks that blobs and results count as absent if the bucket denies their copies but permits uploads,
// that otherwise the query fails with the reason, and that each denial is observed.
func TestDeniedCopies(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		var denials atomic.Int64
		store := named(t, s.open(t, object.Config{
			URL: s.url("&expire_days=10"), Observe: func(_ context.Context, c object.Call) {
				if c.Kind == "copy" && c.Outcome == "denied" && errors.Is(c.Err, cas.ErrDenied) {
					denials.Add(1)
				}
			},
		}), "")
		data, d := castest.Blob(1, 1000)
		put(t, store, data)
		s.replace(t, s.only(t), data, time.Now().Add(-6*24*time.Hour))
		deny := func(denied func(r *http.Request, kind string) bool) {
			s.spoil(faults{before: func(w http.ResponseWriter, r *http.Request, kind string, _ int) bool {
				if denied(r, kind) {
					refuse(w, 403, "AccessDenied", "")
				}
				return denied(r, kind)
			}})
		}
		deny(func(r *http.Request, _ string) bool { return r.Method != http.MethodGet && r.Method != http.MethodHead })
		_, err := store.Missing(t.Context(), []cas.Digest{d})
		expect.Error(t, err, cas.ErrDenied, "without permission to write")
		expect.Message(t, err, "write to the bucket in "+s.scheme)
		expect.Error(t, store.Err(), nil, "the bucket, which can be read")
		expect.Equal(t, denials.Load(), 1, "denied copies")
		deny(func(_ *http.Request, kind string) bool { return kind == "copy" })
		expect.Equal(t, len(must.Get(store.Missing(t.Context(), []cas.Digest{d}))(t)), 1, "missing, with denied copies")
		expect.Equal(t, denials.Load(), 2, "denied copies")
		put(t, store, data)
		expect.Equal(t, len(must.Get(store.Missing(t.Context(), []cas.Digest{d}))(t)), 0, "missing, put again")
		must.Succeed(t, store.Record(t.Context(), d, &repb.ActionResult{}))
		expect.Error(t, expect.Err(store.Lookup(t.Context(), d)), nil, "a new result")
		key := "team/one/!/results/sha256/" + d.Hash() + "-1000"
		s.replace(t, key, s.content(t, key), time.Now().Add(-6*24*time.Hour))
		expect.Error(t, expect.Err(store.Lookup(t.Context(), d)), cas.ErrNotFound, "a result that cannot be renewed")
		expect.Equal(t, s.uploads(t), 0, "uploads in parts that a probe left")
	})
}

// TestFullBucketRenewsNothing checks that old blobs and results stay usable while the bucket is too full to copy them,
// and that Renew and RenewResult, which package overlay retries, report that.
func TestFullBucketRenewsNothing(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		var full atomic.Int64
		c := s.open(t, object.Config{URL: s.url("&expire_days=10"), Observe: func(_ context.Context, c object.Call) {
			if c.Kind == "copy" && c.Outcome == "full" {
				full.Add(1)
			}
		}})
		in := must.Get(c.Instance(""))(t)
		data, d := castest.Blob(1, 1000)
		put(t, in.Store, data)
		must.Succeed(t, in.Actions.Record(t.Context(), d, &repb.ActionResult{ExitCode: 1}))
		for _, key := range s.keys(t) {
			s.replace(t, key, s.content(t, key), time.Now().Add(-6*24*time.Hour))
		}
		renewer := in.Store.(cas.Renewer)
		results := in.Actions.(interface {
			RenewResult(ctx context.Context, action cas.Digest) error
		})
		ds := []cas.Digest{d}
		for code, status := range map[string]int{"XMinioStorageFull": 507, "XMinioAdminBucketQuotaExceeded": 400} {
			full.Store(0)
			s.spoil(faults{before: func(w http.ResponseWriter, _ *http.Request, kind string, _ int) bool {
				if kind == "copy" {
					refuse(w, status, code, "")
				}
				return kind == "copy"
			}})
			expect.Equal(t, len(must.Get(in.Store.Missing(t.Context(), ds))(t)), 0, "%s: missing", code)
			must.Get(in.Store.Open(t.Context(), d, d.Size()))(t)
			expect.Equal(t, must.Get(in.Actions.Lookup(t.Context(), d))(t).ExitCode, 1, "%s: result", code)
			expect.Error(t, expect.Err(renewer.Renew(t.Context(), ds)), cas.ErrUpstreamFull, "%s: Renew", code)
			expect.Error(t, results.RenewResult(t.Context(), d), cas.ErrUpstreamFull, "%s: RenewResult", code)
			expect.Equal(t, full.Load(), 5, "%s: observed copies", code)
		}
		s.spoil(faults{})
		expect.Equal(t, len(must.Get(renewer.Renew(t.Context(), ds))(t)), 0, "with space again: missing")
		must.Succeed(t, results.RenewResult(t.Context(), d))
		expect.Equal(t, s.called("copy"), 2, "copies with space again")
	})
}

// TestDeniedObjects checks that objects that the bucket refuses to find and to read are missing if it permits uploads,
// that many of them cost one probe of uploads, and that otherwise the query fails with the reason.
func TestDeniedObjects(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		store := s.instance(t)
		var ds []cas.Digest
		for i := range 100 { // a bucket may also deny calls about absent objects
			ds = append(ds, cas.SHA256.Sum(fmt.Append(nil, i)))
		}
		data := []byte("0")
		put(t, store, data)
		var uploads atomic.Int64 // of probes
		deny := func(writes bool) {
			s.spoil(faults{before: func(w http.ResponseWriter, r *http.Request, kind string, _ int) bool {
				if r.Method == http.MethodPost {
					uploads.Add(1)
				}
				denied := kind == "HEAD" || kind == "GET" || writes && r.Method == http.MethodPost
				if denied {
					refuse(w, 403, "AccessDenied", "")
				}
				return denied
			}})
		}
		deny(true)
		_, err := store.Missing(t.Context(), ds)
		expect.Error(t, err, cas.ErrDenied, "without permission to write")
		expect.Message(t, err, "write to the bucket in "+s.scheme)
		deny(false)
		uploads.Store(0)
		expect.Slices(t, must.Get(store.Missing(t.Context(), ds))(t), ds, "missing")
		expect.Equal(t, uploads.Load(), 1, "probes of uploads")
		expect.Error(t, store.Err(), nil, "the bucket")
		wantPutAgain(t, s, store, data)
		expect.Equal(t, s.uploads(t), 0, "uploads in parts that a probe left")
	})
}

// TestCheckFindsMissingPermissions checks that a bucket that may only be read is found at the start, and that the check
// leaves nothing in the bucket.
func TestCheckFindsMissingPermissions(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		c := s.open(t, object.Config{})
		if keys, n := s.keys(t), s.uploads(t); len(keys) > 0 || n > 0 {
			t.Errorf("the check left objects %q and %d uploads", keys, n)
		}
		s.spoil(faults{before: func(w http.ResponseWriter, r *http.Request, _ string, _ int) bool {
			if r.Method != http.MethodGet {
				refuse(w, 403, "AccessDenied", "")
			}
			return r.Method != http.MethodGet
		}})
		must.Succeed(t, c.Check(t.Context())) // once is enough
		_, err := object.Open(t.Context(), object.Config{URL: s.url("")})
		if !errors.Is(err, cas.ErrDenied) || !strings.Contains(err.Error(), "write to the bucket in "+s.scheme) {
			t.Errorf("got %v, want ErrDenied for writing", err)
		}
	})
}

// TestCallsAreObserved checks what a metric can count.
func TestCallsAreObserved(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		var mu sync.Mutex
		var got []object.Call
		store := named(t, s.open(t, object.Config{Observe: func(_ context.Context, c object.Call) {
			mu.Lock()
			defer mu.Unlock()
			if c.Kind != "probe" { // in the background, after a failure
				got = append(got, c)
			}
		}}), "")
		take := func() (calls []string) {
			mu.Lock()
			defer mu.Unlock()
			for _, c := range got {
				calls = append(calls, fmt.Sprint(c.Kind, " ", c.Outcome, " ", c.Requests, " ", c.Sent, " ", c.Received))
				expect.That(t, c.Time > 0 && (c.Err == nil) == (c.Outcome == "ok"),
					"got %+v, want a time, and an error unless it is ok", c)
			}
			got = nil
			return calls
		}
		take()
		b, d := castest.Blob(1, 1000)
		put(t, store, b)
		must.Get(cas.ReadAll(t.Context(), store, d, 1000))(t)
		expect.Slices(t, take(), []string{"put ok 1 1000 0", "get ok 1 0 1000"})
		_, absent := castest.Blob(2, 1000)
		store.Missing(t.Context(), []cas.Digest{absent})
		s.spoil(faults{breakAt: 500, breaks: 1})
		must.Get(cas.ReadAll(t.Context(), store, d, 1000))(t)
		s.spoil(faults{before: func(w http.ResponseWriter, _ *http.Request, kind string, n int) bool {
			if kind == "HEAD" && n < 3 {
				refuse(w, 429, "", "")
				return true
			} else if kind == "PUT" {
				refuse(w, 507, "", "")
			}
			return kind == "PUT"
		}})
		store.Missing(t.Context(), []cas.Digest{d})
		store.Put(t.Context(), d, bytes.NewReader(b))
		want := []string{"head not_found 1 0 0", "get unavailable 1 0 500", "get ok 1 0 500", "head ok 3 0 0", "put full 1 1000 0"}
		got2 := take()
		for i, call := range got2 {
			if strings.HasPrefix(call, "put full 1 1000 ") {
				got2[i] = want[4] // the rest is the error message
			}
		}
		expect.Slices(t, got2, want)
	})
}

// TestFetch checks that Fetch reads only absent blobs, in at most 32 parallel calls.
func TestFetch(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		store, to := s.instance(t), castest.NewMemory()
		var ds, absent []cas.Digest
		for i := range 200 {
			b := fmt.Append(nil, "blob ", i)
			d := cas.SHA256.Sum(b)
			ds = append(ds, d)
			switch {
			case i%10 == 0:
				absent = append(absent, d)
			case i%10 == 1:
				put(t, to, b)
			default:
				put(t, store, b)
			}
		}
		// Requests block until there are 32, and a little longer to detect more.
		var mu sync.Mutex
		arrived, full := 0, make(chan struct{})
		s.spoil(faults{before: func(_ http.ResponseWriter, r *http.Request, _ string, _ int) bool {
			mu.Lock()
			if arrived++; arrived == 32 {
				time.AfterFunc(50*time.Millisecond, func() { close(full) })
			}
			mu.Unlock()
			select {
			case <-full:
			case <-r.Context().Done():
			}
			return false
		}})
		got, err := store.Fetch(t.Context(), to, append(slices.Clone(ds), ds...))
		if err != nil || !slices.Equal(got, absent) || to.Len() != len(ds)-len(absent) {
			t.Errorf("got %d absent, %v, %d copied; want %d absent, %d copied", len(got), err, to.Len(), len(absent),
				len(ds)-len(absent))
		}
		if n := s.called("GET"); n != 180 || s.most != 32 {
			t.Errorf("got %d reads, up to %d in parallel, want 180 and 32", n, s.most)
		}
	})
}

// TestDownloadContinuesWithProgress checks that breaks do not count if each attempt makes progress.
func TestDownloadContinuesWithProgress(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		store := s.instance(t)
		d := put(t, store, bytes.Repeat([]byte("long"), 3<<20))
		s.spoil(faults{breakAt: 1 << 20, breaks: 1000})
		if _, err := cas.ReadAll(t.Context(), store, d, d.Size()); err != nil || s.called("GET") < 10 {
			t.Errorf("got %v after %d calls, want nil after at least 10", err, s.called("GET"))
		}
	})
}

// TestMemoryOfUploadsIsBounded checks that only eight parts are in memory at a time.
func TestMemoryOfUploadsIsBounded(t *testing.T) {
	s := serve(t, "s3")
	store := s.instance(t)
	b, d := castest.Blob(1, 16<<20)
	arrived, free := make(chan struct{}, 100), make(chan struct{})
	s.spoil(faults{before: func(http.ResponseWriter, *http.Request, string, int) bool {
		arrived <- struct{}{}
		<-free
		return false
	}})
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			expect.Error(t, store.Put(t.Context(), d, bytes.NewReader(b)), nil)
		})
	}
	for range 8 {
		<-arrived
	}
	// The ninth is not read, and its wait ends with its context.
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	ninth := bytes.NewReader(b)
	if err := store.Put(ctx, d, ninth); !errors.Is(err, context.DeadlineExceeded) || ninth.Len() != len(b) {
		t.Errorf("got %v after %d bytes, want DeadlineExceeded after 0", err, len(b)-ninth.Len())
	}
	close(free)
	group.Wait()
	expect.Error(t, store.Put(t.Context(), d, ninth), nil, "after the others")
}

func TestErrorsRedactSecretsInURLs(t *testing.T) {
	for url, want := range map[string]string{
		"s3://AKIASECRET:SECRET@farm-cache/a":              `"s3://...@farm-cache/a"`,
		"s3://AKIA:SEC?SECRET@farm-cache":                  `"s3://...@farm-cache"`,
		"SECRET:SECRET@farm-cache":                         `"://...@farm-cache"`,
		"s3://farm-cache?reigon=x&password=SECRET":         `"s3://farm-cache?..."`,
		"s3://farm-cache?endpoint=http://u:SECRET@host":    `"s3://...@host"`,
		"s3://farm-cache#SECRET":                           `"s3://farm-cache#..."`,
		"s3://farm-cache?region=SECRET1&region=SECRET2":    `"s3://farm-cache?..."`,
		"http://SECRET@farm-cache?endpoint=http://a@b?c=d": `"http://...@b?..."`,
	} {
		_, err := object.Open(t.Context(), object.Config{URL: url})
		expect.That(t, err != nil && !strings.Contains(err.Error(), "SECRET") && strings.Contains(err.Error(), want),
			"got %v, want %s", err, want)
	}
}

func TestURL(t *testing.T) {
	s := serve(t, "s3")
	for _, url := range []string{
		"", "farm-cache", "http://farm-cache", "s3:farm-cache", "s3://", "s3:///x", "s3://AB", "s3://a",
		"s3://key:secret@farm-cache", "s3://farm-cache:80", "s3://farm-cache#a",
		"s3://farm-cache/a//b", "s3://farm-cache/../b", "s3://farm-cache/a%20b", "s3://farm-cache/.a",
		"s3://farm-cache/" + strings.Repeat("a", 256),
		"s3://farm-cache?endpoint=", "s3://farm-cache?endpoint=localhost:9000",
		"s3://farm-cache?endpoint=ftp://localhost", "s3://farm-cache?endpoint=http://localhost/x",
		"s3://farm-cache?endpoint=http://u@localhost", "s3://farm-cache?endpoint=http://localhost?a=b",
		"s3://farm-cache?endpoint=http://:80",
		"s3://farm-cache?reigon=x", "s3://farm-cache?region=a&region=b", "s3://farm-cache?a;b",
		"gs://farm-cache?region=x",
		"s3://farm-cache?expire_days=0", "s3://farm-cache?expire_days=-1", "s3://farm-cache?expire_days=30d",
		"s3://farm-cache?expire_days=", "s3://farm-cache?ca=", "s3://farm-cache?ca=/no-such-file",
		"s3://farm-cache?ca=object_test.go", "s3://farm-cache?endpoint=http://localhost&ca=x.pem",
	} {
		expect.Error(t, expect.Err(object.Open(t.Context(), object.Config{URL: url})), object.ErrURL, "%q", url)
	}
	for url, prefix := range map[string]string{
		"s3://farm-cache": "", "s3://farm-cache/": "", "s3://farm-cache/a": "a/", "s3://farm-cache/a/b.c/": "a/b.c/",
	} {
		in := named(t, s.open(t, object.Config{URL: url + "?region=eu-west-1&endpoint=" + s.address}), "x")
		d := put(t, in, []byte(url))
		key := fmt.Sprintf("%sx/blobs/sha256/%s-%d", prefix, d.Hash(), d.Size())
		expect.That(t, slices.Contains(s.keys(t), key), "%s: got keys without %s: %q", url, key, s.keys(t))
	}
}
