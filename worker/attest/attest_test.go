// SPDX-License-Identifier: Apache-2.0

package attest

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/secure-systems-lab/go-securesystemslib/dsse"
	"golang.org/x/crypto/ssh"
)

func hash(c string) map[string]string { return map[string]string{"sha256": strings.Repeat(c, 64)} }

// reproducible returns a statement about two equal runs.
func reproducible() *Statement {
	outputs := []Descriptor{{Name: "bin/app", Digest: hash("a")}, {Name: "bin/app.d", Digest: hash("b")}}
	run := Run{Worker: "one", Outputs: outputs, Stdout: Descriptor{Digest: hash("c")}, StartedOn: time.Unix(1_700_000_000, 0).UTC()}
	other := run
	other.Worker, other.Varied = "two", []string{"time +400d"}
	return &Statement{Subjects: outputs, Reproducibility: &Reproducibility{
		Verdict: Same, Action: Descriptor{Name: strings.Repeat("d", 64) + "/142", Digest: hash("d")}, Tool: "cloister test", Runs: []Run{run, other},
	}}
}

func provenance() *Statement {
	return &Statement{Subjects: []Descriptor{{Name: "bin/app", Digest: hash("a")}}, Provenance: &Provenance{
		BuildDefinition: BuildDefinition{BuildType: BuildType, ExternalParameters: Parameters{Action: "d/1", Arguments: []string{"true"}}},
		RunDetails:      RunDetails{Builder: Builder{ID: "https://example.org/builder"}},
	}}
}

func TestDecodeIsInverseOfEncode(t *testing.T) {
	for _, s := range []*Statement{reproducible(), provenance()} {
		text, err := s.Encode()
		if err != nil {
			t.Fatal(err)
		}
		got, err := Decode(text)
		if err != nil {
			t.Fatal(err)
		}
		again, err := got.Encode()
		if err != nil || !bytes.Equal(text, again) {
			t.Errorf("%v: wrote\n%s\nand then\n%s", err, text, again)
		}
	}
}

// A statement that its own runs contradict is refused, both when it is written and when it is read.
func TestVerdictFollowsFromRuns(t *testing.T) {
	for name, spoil := range map[string]func(*Statement){
		"another output":        func(s *Statement) { s.Reproducibility.Runs[1].Outputs = s.Reproducibility.Runs[1].Outputs[:1] },
		"other modes":           func(s *Statement) { s.Reproducibility.Runs[1].Outputs = executable(s.Reproducibility.Runs[1].Outputs) },
		"another stdout":        func(s *Statement) { s.Reproducibility.Runs[1].Stdout.Digest = hash("e") },
		"another stderr":        func(s *Statement) { s.Reproducibility.Runs[1].Stderr.Digest = hash("e") },
		"another exit code":     func(s *Statement) { s.Reproducibility.Runs[1].ExitCode = 1 },
		"another code":          func(s *Statement) { s.Reproducibility.Runs[1].Code = "DeadlineExceeded" },
		"an invented verdict":   func(s *Statement) { s.Reproducibility.Verdict = "fine" },
		"one run":               func(s *Statement) { s.Reproducibility.Runs = s.Reproducibility.Runs[:1] },
		"other subjects":        func(s *Statement) { s.Subjects = s.Subjects[1:] },
		"another subject":       func(s *Statement) { s.Subjects = []Descriptor{s.Subjects[0], {Name: "bin/app.d", Digest: hash("f")}} },
		"both predicates":       func(s *Statement) { s.Provenance = provenance().Provenance },
		"no predicate":          func(s *Statement) { s.Reproducibility = nil },
		"no digest":             func(s *Statement) { s.Subjects[0].Digest = nil },
		"a hash that is none":   func(s *Statement) { s.Subjects[0].Digest = map[string]string{"sha256": strings.Repeat("G", 64)} },
		"another action":        func(s *Statement) { s.Reproducibility.Action.Name = strings.Repeat("e", 64) + "/142" },
		"an unnamed action":     func(s *Statement) { s.Reproducibility.Action.Name = "" },
		"an action of two":      func(s *Statement) { s.Reproducibility.Action.Digest["blake3"] = strings.Repeat("e", 64) },
		"nothing it is about":   func(s *Statement) { *s = *provenance(); s.Subjects = nil },
		"another type of build": func(s *Statement) { *s = *provenance(); s.Provenance.BuildDefinition.BuildType = "x" },
	} {
		s := reproducible()
		spoil(s)
		if _, err := s.Encode(); !errors.Is(err, ErrStatement) {
			t.Errorf("%s: encoded: %v", name, err)
		}
	}
	s := reproducible()
	s.Reproducibility.Verdict = Differs
	s.Reproducibility.Runs[1].Stderr.Digest = hash("e")
	text, err := s.Encode()
	if err != nil {
		t.Fatal(err)
	}
	lie := bytes.Replace(text, []byte(`"verdict":"differs"`), []byte(`"verdict":"same"`), 1)
	if _, err := Decode(lie); bytes.Equal(lie, text) || !errors.Is(err, ErrStatement) {
		t.Errorf("a lie is read: %v", err)
	}
}

// executable returns outputs of which the first is executable.
func executable(outputs []Descriptor) []Descriptor {
	all := slices.Clone(outputs)
	all[0].Annotations = map[string]string{"executable": "true"}
	return all
}

// A signature under a text of another type is none of a statement, though the text be one and the key the right one.
func TestAnotherTypeIsNotAccepted(t *testing.T) {
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	key := privateKeys(t, private)[0]
	text, err := reproducible().Encode()
	if err != nil {
		t.Fatal(err)
	}
	signer, err := dsse.NewEnvelopeSigner(party{key})
	if err != nil {
		t.Fatal(err)
	}
	for kind, good := range map[string]bool{payloadType: true, "text/plain": false} {
		e, err := signer.SignPayload(t.Context(), kind, text)
		if err != nil {
			t.Fatal(err)
		}
		envelope, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		for _, keys := range [][]*Key{{key}, nil} {
			if _, _, err := Open(t.Context(), envelope, keys); (err == nil) != good || !good && !errors.Is(err, ErrStatement) {
				t.Errorf("%s with %d keys: %v", kind, len(keys), err)
			}
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	good, err := provenance().Encode()
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"nothing":              "",
		"no JSON":              "cloister",
		"another type":         strings.Replace(string(good), "Statement/v1", "Statement/v0", 1),
		"another predicate":    strings.Replace(string(good), ProvenanceType, "https://slsa.dev/provenance/v0.2", 1),
		"an unknown field":     strings.Replace(string(good), `{"_type"`, `{"x":1,"_type"`, 1),
		"one in the predicate": strings.Replace(string(good), `"builder":{`, `"builder":{"x":1,`, 1),
		"something behind":     string(good) + "{}",
		"a bracket behind":     string(good) + "}}",
		"a key twice":          strings.Replace(string(good), `"builder":{`, `"builder":{"id":"https://example.org/other",`, 1),
		"two in another case":  strings.Replace(string(good), `"builder":{`, `"builder":{"ID":"https://example.org/other",`, 1),
		"one of other letters": strings.Replace(string(good), `"_type"`, `"\u017fubject":[],"_type"`, 1),
		"an empty predicate":   strings.Replace(string(good), `"predicate":{`, `"predicate":null,"p":{`, 1),
	} {
		if s, err := Decode([]byte(text)); !errors.Is(err, ErrStatement) {
			t.Errorf("%s: %+v, %v", name, s, err)
		}
	}
}

// A statement that was signed is one to whoever has the public key, in whichever format the keys are, and to nobody else.
func TestSignedIsOpened(t *testing.T) {
	_, edwards, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	curve, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	_, foreign, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	_, others := keys(t, foreign, foreign.Public())
	for name, pair := range map[string][2]any{"Ed25519": {edwards, edwards.Public()}, "ECDSA": {curve, curve.Public()}} {
		for i, k := range privateKeys(t, pair[0]) {
			_, public := keys(t, pair[0], pair[1])
			text, err := Sign(t.Context(), reproducible(), k)
			if err != nil {
				t.Fatal(err)
			}
			s, by, err := Open(t.Context(), text, append(others, public...))
			if err != nil || s.Reproducibility == nil || len(by) != 1 || by[0] != k.ID() {
				t.Errorf("%s, format %d: by %q, %v", name, i, by, err)
			}
			if s, _, err := Open(t.Context(), text, others); !errors.Is(err, ErrSignature) {
				t.Errorf("%s: opened with another key: %+v, %v", name, s, err)
			}
			if s, by, err := Open(t.Context(), text, nil); err != nil || s.Reproducibility == nil || len(by) != 0 {
				t.Errorf("%s: without keys: by %q, %v", name, by, err)
			}
			if _, err := Sign(t.Context(), reproducible(), public[0]); !errors.Is(err, ErrKey) {
				t.Errorf("signed by a public key: %v", err)
			}
			changed(t, text, public)
		}
	}
	plain, err := reproducible().Encode()
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := Open(t.Context(), plain, others); !errors.Is(err, ErrSignature) {
		t.Errorf("no signature is one: %v", err)
	}
	if s, _, err := Open(t.Context(), plain, nil); err != nil || s.Reproducibility == nil {
		t.Errorf("an unsigned statement cannot be read: %v", err)
	}
}

// changed tries every way to change a signed statement.
func changed(t *testing.T, text []byte, public []*Key) {
	t.Helper()
	var e map[string]any
	if err := json.Unmarshal(text, &e); err != nil {
		t.Fatal(err)
	}
	payload, err := base64.StdEncoding.DecodeString(e["payload"].(string))
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(){
		"payload": func() {
			e["payload"] = base64.StdEncoding.EncodeToString(bytes.Replace(payload, []byte("one"), []byte("two"), 1))
		},
		"type":         func() { e["payloadType"] = "text/plain" },
		"no signature": func() { e["signatures"] = []any{} },
		"one of no key": func() {
			e["signatures"] = []any{map[string]any{"keyid": "", "sig": base64.StdEncoding.EncodeToString(make([]byte, 64))}}
		},
	} {
		kept := map[string]any{"payload": e["payload"], "payloadType": e["payloadType"], "signatures": e["signatures"]}
		change()
		other, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		if s, by, err := Open(t.Context(), other, public); err == nil {
			t.Errorf("%s changed: opened, by %q: %+v", name, by, s)
		}
		e = kept
	}
}

// privateKeys returns one private key as read from each format.
func privateKeys(t *testing.T, private any) []*Key {
	t.Helper()
	openssh, err := ssh.MarshalPrivateKey(private, "somebody")
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	var ks []*Key
	for _, block := range []*pem.Block{openssh, {Type: "PRIVATE KEY", Bytes: der}} {
		k, err := ParsePrivateKey(pem.EncodeToMemory(block))
		if err != nil {
			t.Fatal(err)
		}
		ks = append(ks, k)
	}
	return ks
}

// keys returns a private key, and its public one as read from each format.
func keys(t *testing.T, private, public any) (*Key, []*Key) {
	t.Helper()
	s, err := ssh.NewPublicKey(public)
	if err != nil {
		t.Fatal(err)
	}
	line, err := ParsePublicKeys(append([]byte("# who\n\n"), ssh.MarshalAuthorizedKey(s)...))
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		t.Fatal(err)
	}
	block, err := ParsePublicKeys(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
	if err != nil {
		t.Fatal(err)
	}
	if line[0].ID() != block[0].ID() {
		t.Errorf("the key is %s and %s", line[0].ID(), block[0].ID())
	}
	return privateKeys(t, private)[0], line
}

func TestKeysThatAreRefused(t *testing.T) {
	large, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	curve, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	_, edwards, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	locked, err := ssh.MarshalPrivateKeyWithPassphrase(edwards, "", []byte("secret"))
	if err != nil {
		t.Fatal(err)
	}
	texts := map[string][]byte{"nothing": nil, "no key": []byte("key"), "a passphrase": pem.EncodeToMemory(locked)}
	for name, k := range map[string]any{"RSA": large, "P-384": curve} {
		der, err := x509.MarshalPKCS8PrivateKey(k)
		if err != nil {
			t.Fatal(err)
		}
		texts[name] = pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	}
	for name, text := range texts {
		if _, err := ParsePrivateKey(text); !errors.Is(err, ErrKey) {
			t.Errorf("%s: %v", name, err)
		} else if name == "a passphrase" && !strings.Contains(err.Error(), "ssh-keygen") {
			t.Errorf("%s: the error does not say what to do: %v", name, err)
		}
	}
	for _, text := range []string{"", "# nobody\n", "ssh-ed25519 AAAA", "-----BEGIN X-----\nAAAA\n-----END X-----\n"} {
		if _, err := ParsePublicKeys([]byte(text)); !errors.Is(err, ErrKey) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// What ssh-keygen makes is a key, with the fingerprint that it prints.
func TestKeyOfSSHKeygen(t *testing.T) {
	tool, err := exec.LookPath("ssh-keygen")
	if err != nil {
		t.Skip("ssh-keygen is not installed")
	}
	path := filepath.Join(t.TempDir(), "key")
	if out, err := exec.Command(tool, "-q", "-t", "ed25519", "-N", "", "-f", path).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	k, err := ParsePrivateKey(text)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(tool, "-l", "-f", path).Output()
	if err != nil || !strings.Contains(string(out), " "+k.ID()+" ") {
		t.Errorf("%s is not in %q, %v", k.ID(), out, err)
	}
	signed, err := Sign(t.Context(), provenance(), k)
	if err != nil {
		t.Fatal(err)
	}
	if text, err = os.ReadFile(path + ".pub"); err != nil {
		t.Fatal(err)
	}
	public, err := ParsePublicKeys(text)
	if err != nil {
		t.Fatal(err)
	}
	if _, by, err := Open(t.Context(), signed, public); err != nil || len(by) != 1 || by[0] != k.ID() {
		t.Errorf("by %q, %v", by, err)
	}
}

func FuzzOpen(f *testing.F) {
	for _, s := range []*Statement{reproducible(), provenance()} {
		text, err := s.Encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte(`{"payloadType":"application/vnd.in-toto+json","payload":"e30=","signatures":[{"sig":""}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		s, _, err := Open(t.Context(), text, nil)
		if err != nil {
			if !errors.Is(err, ErrStatement) {
				t.Errorf("%v", err)
			}
			return
		}
		if _, err := s.Encode(); err != nil {
			t.Errorf("what was read cannot be written: %v", err)
		}
	})
}
