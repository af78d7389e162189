// SPDX-License-Identifier: Apache-2.0

// Package castest holds the contracts of package cas as test suites, and Memory, an in-memory store that tests can
// corrupt. Its subdirectory adds faults to any store. Only tests import it.
package castest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/cloister-build/cloister/cas"
)

// Blob returns size pseudo-random bytes that depend only on seed and size, and their digest.
func Blob(seed byte, size int) ([]byte, cas.Digest) {
	b := make([]byte, size)
	rand.NewChaCha8([32]byte{seed, byte(size), byte(size >> 8), byte(size >> 16), byte(size >> 24)}).Read(b)
	return b, cas.SHA256.Sum(b)
}

// TestStore checks that stores keep the contract of cas.Store, and those of cas.Batcher, cas.Fetcher, cas.Filer,
// cas.Locator and cas.Splicer if they implement them. Each store must be empty and have room for 32 MiB.
func TestStore(t *testing.T, newStore func(t *testing.T) cas.Store) {
	for _, c := range []struct {
		name string
		test func(t *testing.T, s cas.Store)
	}{
		{"RoundTrip", testRoundTrip},
		{"EmptyBlobIsAlwaysPresent", testEmptyBlob},
		{"FunctionsDoNotAlias", testFunctions},
		{"AbsentBlobIsNotFound", testAbsent},
		{"ZeroDigestIsInvalid", testZeroDigest},
		{"OpenHonoursOffset", testOffset},
		{"SizeIsPartOfTheDigest", testSizeInName},
		{"PutRejectsMismatch", testMismatch},
		{"PutStopsReadingTooMuch", testTooMany},
		{"PutRejectsHugeSize", testHuge},
		{"PutStoresNothingOfFailingReader", testFailingReader},
		{"PutOfPresentBlob", testPutPresent},
		{"MissingKeepsOrderAndDeduplicates", testMissing},
		{"ConcurrentPutsOfOneBlob", testConcurrentPut},
		{"ConcurrentPutAndOpen", testConcurrentOpen},
		{"CancelledContext", testCancelled},
		{"CancelledDuringPut", testCancelledPut},
		{"PutAll", testPutAll},
		{"PutAllVerifiesEveryBlob", testPutAllWrong},
		{"PutAllOfManySizes", testPutAllSizes},
		{"ConcurrentPutAll", testConcurrentPutAll},
		{"CancelledPutAll", testCancelledPutAll},
		{"Fetch", testFetch},
		{"File", testFile},
		{"Locate", testLocate},
		{"LocateWhilePutting", testLocateWhilePutting},
		{"SplicedBlobIsABlob", testSpliced},
		{"SpliceRejectsInvalidLists", testSpliceRejects},
		{"SpliceReplacesAndFlattens", testSpliceFlattens},
		{"CancelledSplice", testCancelledSplice},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, newStore(t)) })
	}
}

func put(t *testing.T, s cas.Store, b []byte) {
	t.Helper()
	if _, err := cas.PutBytes(t.Context(), s, cas.SHA256, b); err != nil {
		t.Fatalf("Put of %d bytes: %v", len(b), err)
	}
}

func get(t *testing.T, s cas.Store, d cas.Digest, off int64) []byte {
	t.Helper()
	r, err := s.Open(t.Context(), d, off)
	if err != nil {
		t.Fatalf("Open of %s at %d: %v", d, off, err)
	}
	b, err := io.ReadAll(r)
	if err := errors.Join(err, r.Close()); err != nil {
		t.Fatalf("read of %s from %d: %v", d, off, err)
	}
	return b
}

func wantPresent(t *testing.T, s cas.Store, d cas.Digest) {
	t.Helper()
	if missing, err := s.Missing(t.Context(), []cas.Digest{d}); err != nil || len(missing) > 0 {
		t.Errorf("Missing of %s: got %v, %v, want it present", d, missing, err)
	}
}

func wantAbsent(t *testing.T, s cas.Store, d cas.Digest) {
	t.Helper()
	if missing, err := s.Missing(t.Context(), []cas.Digest{d}); err != nil || len(missing) != 1 {
		t.Errorf("Missing of %s: got %v, %v, want it absent", d, missing, err)
	}
	wantOpen(t, s, d, 0, cas.ErrNotFound)
}

func wantCancelled(t *testing.T, what string, err error) {
	t.Helper()
	wantError(t, what, err, context.Canceled)
}

// wantContent checks that the blob reads as want from an offset.
func wantContent(t *testing.T, s cas.Store, d cas.Digest, off int64, want []byte) {
	t.Helper()
	if got := get(t, s, d, off); !bytes.Equal(got, want) {
		t.Errorf("Open of %s at %d: got %d bytes (%.20q ...), want %d (%.20q ...)", d, off, len(got), got, len(want), want)
	}
}

// wantOpen checks that Open fails with an error.
func wantOpen(t *testing.T, s cas.Store, d cas.Digest, off int64, want error) {
	t.Helper()
	r, err := s.Open(t.Context(), d, off)
	closeIfOpen(r)
	wantError(t, fmt.Sprintf("Open of %s at %d", d, off), err, want)
}

// wantPut checks that a Put of b as d fails with an error.
func wantPut(t *testing.T, s cas.Store, d cas.Digest, b []byte, want error) {
	t.Helper()
	wantError(t, fmt.Sprintf("Put of %d bytes as %s", len(b), d), s.Put(t.Context(), d, bytes.NewReader(b)), want)
}

func wantError(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: got %v, want %v", what, err, want)
	}
}

// capability returns a capability of the store, or skips the test if the store does not have it.
func capability[C any](t *testing.T, s cas.Store) C {
	t.Helper()
	c, ok := cas.As[C](s)
	if !ok {
		t.Skipf("the store has no %T", &c)
	}
	return c
}

// cancelled returns a context that has ended.
func cancelled(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

func closeIfOpen(r io.Closer) {
	if r != nil {
		r.Close()
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
