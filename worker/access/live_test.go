// SPDX-License-Identifier: Apache-2.0

package access_test

import (
	"crypto/rsa"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/syncbuf"
	"github.com/cloister-build/cloister/worker/access"
	"github.com/golang-jwt/jwt/v5"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A written file gets a new modification time with each text, independent of the clock's resolution.
type written struct {
	t    *testing.T
	name string
	at   time.Time
}

func (w *written) write(text string) {
	w.t.Helper()
	write(w.t, w.name, []byte(text))
	if w.at = w.at.Add(time.Second); w.at.Year() == 1 {
		w.at = time.Now().Add(-time.Hour)
	}
	must.Succeed(w.t, os.Chtimes(w.name, w.at, w.at))
}

// ofToken returns the text of a file with one caller.
func ofToken(token, right string) string {
	return fmt.Sprintf("version: 1\ncallers: [{name: ci, token_sha256: %s, rights: [%s]}]\n", sum(token), right)
}

// TestCallersAreReadAgain checks that a changed file applies to the next call, also on open connections, and that a
// file with a mistake changes nothing and is logged once.
func TestCallersAreReadAgain(t *testing.T) {
	file := &written{t: t, name: filepath.Join(t.TempDir(), "auth.yaml")}
	file.write(ofToken("old", "read"))
	var log syncbuf.Buffer
	certain := errors.New("no certificates here")
	live, err := access.NewLive(file.name, func(r *access.Rules) error {
		if r.Certificates() {
			return certain
		}
		return nil
	}, slog.New(slog.NewTextHandler(&log, nil)))
	must.Succeed(t, err)
	defer live.Close()
	s := serve(t, live, nil)
	before, after := s.dial(nil, "Bearer old"), s.dial(nil, "Bearer new")
	check := func(when string, wantOld, wantNew codes.Code) {
		t.Helper()
		live.Look()
		for range 2 {
			expect.Code(t, calls["BatchReadBlobs"](t.Context(), before, ""), wantOld, "%s: the old token", when)
			expect.Code(t, calls["BatchReadBlobs"](t.Context(), after, ""), wantNew, "%s: the new token", when)
		}
	}
	check("at first", codes.OK, codes.Unauthenticated)
	file.write(strings.Replace(ofToken("old", "read"), sum("old"), "["+sum("old")+", "+sum("new")+"]", 1))
	check("with both", codes.OK, codes.OK)
	file.write(ofToken("new", "read"))
	check("replaced", codes.Unauthenticated, codes.OK)
	if text := log.String(); strings.Count(text, "has changed") != 2 || strings.Contains(text, "cannot") {
		t.Errorf("two changes, and the log says\n%s", text)
	}
	for _, mistake := range []string{
		"", "version: 1\n", ofToken("old", "raed"),
		"version: 1\ncallers: [{name: c, certificate: {subject: c}, rights: [read]}]\n",
	} {
		file.write(mistake)
		check("with a mistake", codes.Unauthenticated, codes.OK)
	}
	must.Succeed(t, os.Remove(file.name))
	check("removed", codes.Unauthenticated, codes.OK)
	if text := log.String(); strings.Count(text, "cannot read the callers file") != 5 || !strings.Contains(text, certain.Error()) {
		t.Errorf("five mistakes, and the log says\n%s", text)
	}
	file.write(ofToken("new", "write"))
	check("less", codes.Unauthenticated, codes.PermissionDenied)
	file.write(ofToken("old", "read"))
	check("as at first", codes.OK, codes.Unauthenticated)
}

// TestFailClosed: every call is refused while the file has a mistake; once it has none, its rules apply again.
func TestFailClosed(t *testing.T) {
	file := &written{t: t, name: filepath.Join(t.TempDir(), "auth.yaml")}
	file.write(ofToken("ci", "read"))
	live := must.Get(access.NewLive(file.name, nil, nil))(t)
	defer live.Close()
	s := serve(t, live, nil)
	ci, stranger := s.dial(nil, "Bearer ci"), s.dial(nil, "Bearer other")
	check := func(when string, wantCI, wantStranger codes.Code, stale bool) {
		t.Helper()
		live.Look()
		expect.Code(t, calls["BatchReadBlobs"](t.Context(), ci, ""), wantCI, "%s", when)
		expect.Code(t, calls["BatchReadBlobs"](t.Context(), stranger, ""), wantStranger, "%s: a stranger", when)
		if err := live.Stale(); (err != nil) != stale {
			t.Errorf("%s: Stale: got %v", when, err)
		}
	}
	check("at first", codes.OK, codes.Unauthenticated, false)
	must.Succeed(t, os.Rename(file.name, file.name+".old"))
	file.write("version: 1\n")
	check("open", codes.OK, codes.Unauthenticated, true)
	live.FailClosed.Store(true)
	check("closed", codes.Unavailable, codes.Unavailable, true)
	check("closed", codes.Unavailable, codes.Unavailable, true)
	must.Succeed(t, os.Rename(file.name+".old", file.name))
	check("as at first", codes.OK, codes.Unauthenticated, false)
}

// TestReplacedFileWithSameTimeAndSizeIsReadAgain covers tools that preserve file times; all hashes have one length.
func TestReplacedFileWithSameTimeAndSizeIsReadAgain(t *testing.T) {
	dir, at := t.TempDir(), time.Unix(1, 0)
	name := filepath.Join(dir, "auth.yaml")
	replace := func(text string) {
		t.Helper()
		write(t, name+".new", []byte(text))
		must.Succeed(t, errors.Join(os.Chtimes(name+".new", at, at), os.Rename(name+".new", name)))
	}
	replace(ofToken("old", "read"))
	live := must.Get(access.NewLive(name, func(*access.Rules) error { return nil }, slog.New(slog.DiscardHandler)))(t)
	defer live.Close()
	s := serve(t, live, nil)
	before, after := s.dial(nil, "Bearer old"), s.dial(nil, "Bearer new")
	replace(ofToken("new", "read"))
	live.Look()
	expect.Code(t, calls["BatchReadBlobs"](t.Context(), before, ""), codes.Unauthenticated, "the old token")
	expect.Error(t, calls["BatchReadBlobs"](t.Context(), after, ""), nil, "the new token")
}

// TestKeysAreReadAgain checks that a removed key verifies nothing, not even a token that was verified before.
func TestKeysAreReadAgain(t *testing.T) {
	dir := t.TempDir()
	file, keys := &written{t: t, name: filepath.Join(dir, "auth.yaml")}, &written{t: t, name: filepath.Join(dir, "keys.pem")}
	k := newKeys(t)
	token := func(key *rsa.PrivateKey) string {
		return "Bearer " + sign(t, jwt.SigningMethodRS256, key, nil, jwt.MapClaims{"exp": time.Now().Add(time.Hour).Unix()})
	}
	keys.write(string(publicPEM(t, k.rsa.Public())))
	file.write("version: 1\ncallers: [{name: ci, jwt: {keys: keys.pem}, rights: [read]}]\n")
	live, err := access.NewLive(file.name, func(*access.Rules) error { return nil }, slog.New(slog.DiscardHandler))
	must.Succeed(t, err)
	defer live.Close()
	s := serve(t, live, nil)
	first, second := s.dial(nil, token(k.rsa)), s.dial(nil, token(k.other))
	for i, want := range [][2]codes.Code{{codes.OK, codes.Unauthenticated}, {codes.Unauthenticated, codes.OK}} {
		if i == 1 {
			keys.write(string(publicPEM(t, k.other.Public())))
			live.Look()
		}
		for range 2 {
			a, b := calls["BatchReadBlobs"](t.Context(), first, ""), calls["BatchReadBlobs"](t.Context(), second, "")
			expect.That(t, status.Code(a) == want[0] && status.Code(b) == want[1],
				"keys %d: got %v and %v, want %v", i, a, b, want)
		}
	}
}

// TestCallsWhileTheFileChanges checks that a caller in every version of the file is never refused.
func TestCallsWhileTheFileChanges(t *testing.T) {
	name := filepath.Join(t.TempDir(), "auth.yaml")
	write(t, name, []byte(ofToken("ci", "read")))
	live := must.Get(access.NewLive(name, func(*access.Rules) error { return nil }, slog.New(slog.DiscardHandler)))(t)
	defer live.Close()
	s := serve(t, live, nil)
	var wg sync.WaitGroup
	for range 4 {
		conn := s.dial(nil, "Bearer ci")
		wg.Go(func() {
			for range 100 {
				expect.Error(t, calls["BatchReadBlobs"](t.Context(), conn, ""), nil)
			}
		})
	}
	for i := range 50 { // as documented: the whole of a new one, under the name at once
		text := ofToken("ci", "read") + strings.Repeat("#", i)
		write(t, name+".new", []byte(text))
		must.Succeed(t, os.Rename(name+".new", name))
		live.Look()
	}
	wg.Wait()
}
