// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cmd/cloister/internal/attestation"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/repro/attest"
	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
)

// keyFiles writes a new pair of keys.
func keyFiles(t *testing.T, dir, name string) (private, public string) {
	t.Helper()
	p, k, err := ed25519.GenerateKey(rand.Reader)
	must.Succeed(t, err)
	block := must.Get(ssh.MarshalPrivateKey(k, ""))(t)
	s := must.Get(ssh.NewPublicKey(p))(t)
	private, public = filepath.Join(dir, name), filepath.Join(dir, name+".pub")
	must.Succeed(t, errors.Join(os.WriteFile(private, pem.EncodeToMemory(block), 0o600), os.WriteFile(public, ssh.MarshalAuthorizedKey(s), 0o644)))
	return private, public
}

// TestPrivateKeyCannotVerify: the error says which file to pass, and shows nothing of the key.
func TestPrivateKeyCannotVerify(t *testing.T) {
	private, _ := keyFiles(t, t.TempDir(), "key")
	want := "--key " + private + " is a private key; pass its public key, such as " + private + ".pub"
	if got, code := runCLI(t, "attest", "verify", "statement", "--key", private); code != exit.Usage || got != want {
		t.Errorf("got exit %d, %q; want %d, %q", code, got, exit.Usage, want)
	}
}

// Each requirement of attest verify accepts the statement that meets it, and no other.
func TestAttestVerify(t *testing.T) {
	dir := t.TempDir()
	private, public := keyFiles(t, dir, "key")
	_, foreign := keyFiles(t, dir, "other")
	app := filepath.Join(dir, "app")
	must.Succeed(t, os.WriteFile(app, []byte("app"), 0o755))
	sum := sha256.Sum256([]byte("app"))
	link := sha256.Sum256([]byte("target"))
	target := filepath.Join(dir, "target")
	must.Succeed(t, os.WriteFile(target, []byte("target"), 0o644))
	outputs := []attest.Descriptor{
		{Name: "bin/\x1b[31mapp", Digest: map[string]string{"sha256": hex.EncodeToString(sum[:])}},
		{Name: "link\nsigned by    SHA256:nobody", Digest: map[string]string{"sha256": hex.EncodeToString(link[:])}, MediaType: attestation.MediaLink},
	}
	action := strings.Repeat("a", 64) + "/142"
	run := attest.Run{Worker: "one", Outputs: outputs}
	varied := run
	varied.Varied = []string{"time +400d"}
	statement := func(second attest.Run, verdict string) *attest.Statement {
		return &attest.Statement{Subjects: outputs, Reproducibility: &attest.Reproducibility{
			Verdict: verdict, Action: attest.Descriptor{Name: action, Digest: map[string]string{"sha256": strings.Repeat("a", 64)}}, Runs: []attest.Run{run, second},
		}}
	}
	write := func(name string, s *attest.Statement, key string) string {
		to := attestation.Flags{Path: filepath.Join(dir, name), Key: key}
		k, err := to.Load(t.Context())
		if err == nil {
			err = to.Write(t.Context(), s, k)
		}
		must.Succeed(t, err)
		return to.Path
	}
	signed := write("signed", statement(varied, attest.Same), private)
	percent := write("%d%s", statement(varied, attest.Same), private)
	plain := write("plain", statement(varied, attest.Same), "")
	differs := write("differs", statement(attest.Run{Worker: "one"}, attest.Differs), private)

	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{signed, "--key", public, "--file", app, "--action", action, "--reproducible"}, 0, "same in 2 runs"},
		{[]string{signed, "--key", foreign, "--key", public}, 0, "SHA256:"},
		{[]string{signed, "--key", public, "--json"}, 0, `"predicateType"`},
		{[]string{signed, "--unsigned"}, 0, "nobody"},
		{[]string{plain, "--unsigned"}, 0, "nobody"},
		{[]string{differs, "--key", public}, 0, "differs in 2 runs"},
		{[]string{signed, "--key", foreign}, exit.No, "not signed by an accepted key"},
		{[]string{plain, "--key", public}, exit.No, "no signature"},
		{[]string{differs, "--key", public, "--reproducible"}, exit.No, "reproducible"},
		{[]string{percent, "--key", foreign}, exit.No, "%d%s: not signed"},
		{[]string{signed, "--key", public, "--key", public}, 0, "same in 2 runs"},
		{[]string{signed, "--key", public, "--file", public}, exit.No, "not a file among its 2 subjects"},
		{[]string{signed, "--key", public, "--file", target}, exit.No, "not a file among its 2 subjects"},
		{[]string{signed, "--key", public, "--action", strings.Repeat("b", 64) + "/1"}, exit.No, "it is about action"},
		{[]string{public, "--key", public}, exit.No, "not a valid statement"},
		{[]string{signed}, exit.Usage, "--unsigned"},
		{[]string{signed, "--key", public, "--unsigned"}, exit.Usage, "--unsigned"},
		{[]string{signed, "--key", app}, exit.Usage, "unusable key"},
		{[]string{filepath.Join(dir, "absent"), "--key", public}, exit.Usage, "absent"},
		{[]string{signed, "--key", public, "--file", filepath.Join(dir, "absent")}, exit.Usage, "absent"},
		{[]string{signed, "--key", public, "--action", "x"}, exit.Usage, "--action"},
	} {
		out, code := runCLI(t, append([]string{"attest", "verify"}, c.args...)...)
		expect.That(t, code == c.code && strings.Contains(out, c.says),
			"%q: exit %d with %q; want %d with %q", c.args, code, out, c.code, c.says)
		expect.That(t, !strings.Contains(out, "\x1b"), "%q: a control character is printed: %q", c.args, out)
		expect.That(t, !strings.Contains(out, "\nsigned by"), "%q: a name prints a line of its own: %q", c.args, out)
	}
}

// A key that others can read is rejected, and a failed write leaves the old file.
func TestAttestKeyMustBePrivate(t *testing.T) {
	dir := t.TempDir()
	private, public := keyFiles(t, dir, "key")
	must.Succeed(t, os.Chmod(private, 0o644))
	t.Setenv("SSH_AUTH_SOCK", "")
	for _, e := range []attestation.Flags{{Path: "x", Key: private}, {Path: "x", Key: public}, {Path: "x", Key: filepath.Join(dir, "absent")}, {Key: private}} {
		if k, err := e.Load(t.Context()); err == nil {
			t.Errorf("%+v: loaded %s", e, k.ID())
		}
	}
	path := filepath.Join(dir, "statement")
	must.Succeed(t, os.WriteFile(path, []byte("before"), 0o644))
	e := attestation.Flags{Path: path}
	expect.That(t, e.Write(t.Context(), &attest.Statement{}, nil) != nil, "a statement that says nothing is written")
	expect.Equal(t, string(must.Get(os.ReadFile(path))(t)), "before")
}

// A key with a passphrase signs with the passphrase file, and ssh-agent signs for a public key; errors name the
// problem.
func TestAttestKeyIsUnlocked(t *testing.T) {
	dir := t.TempDir()
	plain, public := keyFiles(t, dir, "plain")
	text := must.Get(os.ReadFile(plain))(t)
	raw := must.Get(ssh.ParseRawPrivateKey(text))(t)
	block := must.Get(ssh.MarshalPrivateKeyWithPassphrase(*raw.(*ed25519.PrivateKey), "", []byte("to be kept")))(t)
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		must.Succeed(t, os.WriteFile(path, []byte(text), mode))
		return path
	}
	locked := write("locked", string(pem.EncodeToMemory(block)), 0o600)
	good := write("good", "to be kept\nanother line\n", 0o600)
	ring, socket := agent.NewKeyring(), filepath.Join(dir, "agent")
	l := must.Get(net.Listen("unix", socket))(t)
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			agent.ServeAgent(ring, conn)
			conn.Close()
		}
	}()
	_, foreign := keyFiles(t, dir, "foreign")
	must.Succeed(t, ring.Add(agent.AddedKey{PrivateKey: raw}))
	both := must.Get(os.ReadFile(foreign))(t)
	for _, c := range []struct {
		key, passphrase, agent string
		says                   string // "" if it signs
	}{
		{locked, good, "", ""},
		{locked, write("windows", "to be kept\r\n", 0o400), "", ""},
		{locked, write("bare", "to be kept", 0o600), "", ""},
		{public, "", socket, ""},
		{plain, "", socket, ""},
		{locked, write("other", "to be lost\n", 0o600), "", "the given one is wrong"},
		{locked, write("empty", "", 0o600), "", "the given one is empty"},
		{locked, write("open", "to be kept\n", 0o644), "", "chmod 600"},
		{locked, filepath.Join(dir, "absent"), "", "absent"},
		{plain, good, "", "the key has no passphrase"},
		{"", good, "", "--passphrase-file needs --key"},
		{public, "", "", "SSH_AUTH_SOCK"},
		{public, "", filepath.Join(dir, "absent"), "ssh-agent cannot sign"},
		{public, good, socket, "omit --passphrase-file"},
		{foreign, "", socket, "ssh-add KEY"},
		{write("both", string(both)+string(both), 0o644), "", socket, "2 public keys"},
	} {
		t.Setenv("SSH_AUTH_SOCK", c.agent)
		e := attestation.Flags{Path: filepath.Join(dir, "statement"), Key: c.key, PassphraseFile: c.passphrase}
		k, err := e.Load(t.Context())
		if c.says != "" {
			if err == nil || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "to be") {
				t.Errorf("%+v: %v", e, err)
			}
			continue
		}
		if err == nil {
			err = e.Write(t.Context(), &attest.Statement{
				Subjects:   []attest.Descriptor{{Name: "app", Digest: map[string]string{"sha256": strings.Repeat("a", 64)}}},
				Provenance: &attest.Provenance{BuildDefinition: attest.BuildDefinition{BuildType: attest.BuildType}},
			}, k)
		}
		if err != nil {
			t.Errorf("%+v: %v", e, err)
			continue
		}
		if out, code := runCLI(t, "attest", "verify", e.Path, "--key", public); code != 0 || !strings.Contains(out, k.ID()) {
			t.Errorf("%+v: verified with exit %d: %s", e, code, out)
		}
	}
}
