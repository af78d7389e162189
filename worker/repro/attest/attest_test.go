// SPDX-License-Identifier: Apache-2.0

package attest

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/secure-systems-lab/go-securesystemslib/dsse"
	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
)

func hash(c string) map[string]string { return map[string]string{"sha256": strings.Repeat(c, 64)} }

// reproducible returns a statement about two equal runs.
func reproducible() *Statement {
	outputs := []Descriptor{{Name: "bin/app", Digest: hash("a")}, {Name: "bin/app.d", Digest: hash("b")}}
	run := Run{
		Worker:    "one",
		Outputs:   outputs,
		Stdout:    Descriptor{Digest: hash("c")},
		StartedOn: time.Unix(1_700_000_000, 0).UTC(),
	}
	other := run
	other.Worker, other.Varied = "two", []string{"time +400d"}
	return &Statement{Subjects: outputs, Reproducibility: &Reproducibility{
		Verdict: Same, Action: Descriptor{Name: strings.Repeat("d", 64) + "/142", Digest: hash("d")}, Tool: "cloister test", Runs: []Run{run, other},
	}}
}

func provenance() *Statement {
	return &Statement{Subjects: []Descriptor{{Name: "bin/app", Digest: hash("a")}}, Provenance: &Provenance{
		BuildDefinition: BuildDefinition{
			BuildType:          BuildType,
			ExternalParameters: Parameters{Action: "d/1", Arguments: []string{"true"}},
		},
		RunDetails: RunDetails{Builder: Builder{ID: "https://example.org/builder"}},
	}}
}

func TestDecodeIsInverseOfEncode(t *testing.T) {
	for _, s := range []*Statement{reproducible(), provenance()} {
		text, err := s.Encode()
		must.Succeed(t, err)
		got, err := decode(text)
		must.Succeed(t, err)
		again, err := got.Encode()
		expect.That(t, err == nil && bytes.Equal(text, again), "%v: wrote\n%s\nand then\n%s", err, text, again)
	}
}

func TestEncodeAndDecodeRejectContradictions(t *testing.T) {
	for name, spoil := range map[string]func(*Statement){
		"different output":      func(s *Statement) { s.Reproducibility.Runs[1].Outputs = s.Reproducibility.Runs[1].Outputs[:1] },
		"different mode":        func(s *Statement) { s.Reproducibility.Runs[1].Outputs = executable(s.Reproducibility.Runs[1].Outputs) },
		"different stdout":      func(s *Statement) { s.Reproducibility.Runs[1].Stdout.Digest = hash("e") },
		"different stderr":      func(s *Statement) { s.Reproducibility.Runs[1].Stderr.Digest = hash("e") },
		"different exit code":   func(s *Statement) { s.Reproducibility.Runs[1].ExitCode = 1 },
		"different code":        func(s *Statement) { s.Reproducibility.Runs[1].Code = "DeadlineExceeded" },
		"unknown verdict":       func(s *Statement) { s.Reproducibility.Verdict = "fine" },
		"one run":               func(s *Statement) { s.Reproducibility.Runs = s.Reproducibility.Runs[:1] },
		"missing subject":       func(s *Statement) { s.Subjects = s.Subjects[1:] },
		"wrong subject":         func(s *Statement) { s.Subjects = []Descriptor{s.Subjects[0], {Name: "bin/app.d", Digest: hash("f")}} },
		"both predicates":       func(s *Statement) { s.Provenance = provenance().Provenance },
		"no predicate":          func(s *Statement) { s.Reproducibility = nil },
		"no digest":             func(s *Statement) { s.Subjects[0].Digest = nil },
		"malformed hash":        func(s *Statement) { s.Subjects[0].Digest = map[string]string{"sha256": strings.Repeat("G", 64)} },
		"wrong action name":     func(s *Statement) { s.Reproducibility.Action.Name = strings.Repeat("e", 64) + "/142" },
		"no action name":        func(s *Statement) { s.Reproducibility.Action.Name = "" },
		"action with 2 digests": func(s *Statement) { s.Reproducibility.Action.Digest["blake3"] = strings.Repeat("e", 64) },
		"no subject":            func(s *Statement) { *s = *provenance(); s.Subjects = nil },
		"wrong build type":      func(s *Statement) { *s = *provenance(); s.Provenance.BuildDefinition.BuildType = "x" },
	} {
		s := reproducible()
		spoil(s)
		expect.Error(t, expect.Err(s.Encode()), ErrStatement, "%s", name)
	}
	s := reproducible()
	s.Reproducibility.Verdict = Differs
	s.Reproducibility.Runs[1].Stderr.Digest = hash("e")
	text := must.Get(s.Encode())(t)
	forged := bytes.Replace(text, []byte(`"verdict":"differs"`), []byte(`"verdict":"same"`), 1)
	if _, err := decode(forged); bytes.Equal(forged, text) || !errors.Is(err, ErrStatement) {
		t.Errorf("forged verdict: got %v, want ErrStatement", err)
	}
}

// executable returns outputs with the first one executable.
func executable(outputs []Descriptor) []Descriptor {
	all := slices.Clone(outputs)
	all[0].Annotations = map[string]string{"executable": "true"}
	return all
}

func TestOpenRejectsOtherPayloadTypes(t *testing.T) {
	_, private, err := ed25519.GenerateKey(rand.Reader)
	must.Succeed(t, err)
	key := privateKeys(t, private)[0]
	text, err := reproducible().Encode()
	must.Succeed(t, err)
	signer, err := dsse.NewEnvelopeSigner(party{key})
	must.Succeed(t, err)
	for kind, good := range map[string]bool{payloadType: true, "text/plain": false} {
		e := must.Get(signer.SignPayload(t.Context(), kind, text))(t)
		envelope := must.Get(json.Marshal(e))(t)
		for _, keys := range [][]*Key{{key}, nil} {
			if _, _, err := Open(t.Context(), envelope, keys); (err == nil) != good ||
				!good && !errors.Is(err, ErrStatement) {
				t.Errorf("%s with %d keys: %v", kind, len(keys), err)
			}
		}
	}
}

func TestDecodeRejectsInvalidStatements(t *testing.T) {
	good := must.Get(provenance().Encode())(t)
	for name, text := range map[string]string{
		"empty":                 "",
		"no JSON":               "cloister",
		"another type":          strings.Replace(string(good), "Statement/v1", "Statement/v0", 1),
		"another predicate":     strings.Replace(string(good), provenanceType, "https://slsa.dev/provenance/v0.2", 1),
		"unknown field":         strings.Replace(string(good), `{"_type"`, `{"x":1,"_type"`, 1),
		"unknown, nested":       strings.Replace(string(good), `"builder":{`, `"builder":{"x":1,`, 1),
		"trailing value":        string(good) + "{}",
		"trailing bracket":      string(good) + "}}",
		"duplicate key":         strings.Replace(string(good), `"builder":{`, `"builder":{"id":"https://example.org/other",`, 1),
		"duplicate, other case": strings.Replace(string(good), `"builder":{`, `"builder":{"ID":"https://example.org/other",`, 1),
		"duplicate, long s":     strings.Replace(string(good), `"_type"`, `"\u017fubject":[],"_type"`, 1),
		"null predicate":        strings.Replace(string(good), `"predicate":{`, `"predicate":null,"p":{`, 1),
	} {
		expect.Error(t, expect.Err(decode([]byte(text))), ErrStatement, "%s", name)
	}
}

func TestOpenAcceptsOnlySignaturesOfGivenKeys(t *testing.T) {
	_, edwards, err := ed25519.GenerateKey(rand.Reader)
	must.Succeed(t, err)
	curve, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must.Succeed(t, err)
	_, foreign, err := ed25519.GenerateKey(rand.Reader)
	must.Succeed(t, err)
	_, others := keys(t, foreign, foreign.Public())
	large := rsaKey(t)
	for name, pair := range map[string][2]any{"Ed25519": {edwards, edwards.Public()}, "ECDSA": {curve, curve.Public()}, "RSA": {large, large.Public()}} {
		for i, k := range privateKeys(t, pair[0]) {
			_, public := keys(t, pair[0], pair[1])
			text, err := Sign(t.Context(), reproducible(), k)
			must.Succeed(t, err)
			s, by, err := Open(t.Context(), text, append(others, public...))
			expect.That(t, err == nil && s.Reproducibility != nil && len(by) == 1 && by[0] == k.ID(),
				"%s, format %d: by %q, %v", name, i, by, err)
			if s, _, err := Open(t.Context(), text, others); !errors.Is(err, ErrSignature) ||
				!strings.Contains(err.Error(), k.ID()) ||
				!strings.Contains(err.Error(), others[0].ID()) {
				t.Errorf("%s: opened with another key: %+v, %v", name, s, err)
			}
			if s, by, err := Open(t.Context(), text, nil); err != nil || s.Reproducibility == nil || len(by) != 0 {
				t.Errorf("%s: without keys: by %q, %v", name, by, err)
			}
			expect.Error(t, expect.Err(Sign(t.Context(), reproducible(), public[0])), ErrKey, "Sign with a public key")
			changed(t, text, public)
		}
	}
	plain, err := reproducible().Encode()
	must.Succeed(t, err)
	if _, _, err := Open(t.Context(), plain, others); !errors.Is(err, ErrSignature) {
		t.Errorf("unsigned: got %v, want ErrSignature", err)
	}
	if s, _, err := Open(t.Context(), plain, nil); err != nil || s.Reproducibility == nil {
		t.Errorf("unsigned, no keys: %v", err)
	}
}

// TestNilArgumentsAreErrors that name the missing argument. A zero Key counts as missing.
func TestNilArgumentsAreErrors(t *testing.T) {
	_, k, err := ed25519.GenerateKey(rand.Reader)
	must.Succeed(t, err)
	private, public := keys(t, k, k.Public())
	text, err := Sign(t.Context(), reproducible(), private)
	must.Succeed(t, err)
	if _, err := Sign(t.Context(), nil, private); !errors.Is(err, ErrStatement) || !strings.Contains(err.Error(), "the Statement is missing") {
		t.Errorf("Sign: got %v, want an error that names the Statement", err)
	}
	for _, key := range []*Key{nil, {}} {
		for name, call := range map[string]func() error{
			"Sign":     func() error { _, err := Sign(t.Context(), reproducible(), key); return err },
			"Open":     func() error { _, _, err := Open(t.Context(), text, append(public, key)); return err },
			"AgentKey": func() error { _, err := AgentKey(t.Context(), "socket", key); return err },
		} {
			if err := call(); !errors.Is(err, ErrKey) || !strings.Contains(err.Error(), "the Key is missing") {
				t.Errorf("%s with %v: got %v, want an error that names the Key", name, key, err)
			}
		}
	}
}

// changed checks that Open rejects changes of a signed statement.
func changed(t *testing.T, text []byte, public []*Key) {
	t.Helper()
	var e map[string]any
	must.Succeed(t, json.Unmarshal(text, &e))
	payload := must.Get(base64.StdEncoding.DecodeString(e["payload"].(string)))(t)
	for name, change := range map[string]func(){
		"payload": func() {
			e["payload"] = base64.StdEncoding.EncodeToString(bytes.Replace(payload, []byte("one"), []byte("two"), 1))
		},
		"type":         func() { e["payloadType"] = "text/plain" },
		"no signature": func() { e["signatures"] = []any{} },
		"empty key ID": func() {
			e["signatures"] = []any{map[string]any{"keyid": "", "sig": base64.StdEncoding.EncodeToString(make([]byte, 64))}}
		},
	} {
		kept := map[string]any{"payload": e["payload"], "payloadType": e["payloadType"], "signatures": e["signatures"]}
		change()
		other := must.Get(json.Marshal(e))(t)
		if s, by, err := Open(t.Context(), other, public); err == nil {
			t.Errorf("%s changed: opened, by %q: %+v", name, by, s)
		}
		e = kept
	}
}

// privateKeys returns a private key parsed from each format.
func privateKeys(t *testing.T, private any) []*Key {
	t.Helper()
	openssh := must.Get(ssh.MarshalPrivateKey(private, "somebody"))(t)
	der := must.Get(x509.MarshalPKCS8PrivateKey(private))(t)
	var ks []*Key
	for _, block := range []*pem.Block{openssh, {Type: "PRIVATE KEY", Bytes: der}} {
		k := must.Get(ParsePrivateKey(pem.EncodeToMemory(block), nil))(t)
		ks = append(ks, k)
	}
	return ks
}

// keys returns a private key and its public key parsed from OpenSSH's format.
func keys(t *testing.T, private, public any) (*Key, []*Key) {
	t.Helper()
	s := must.Get(ssh.NewPublicKey(public))(t)
	line := must.Get(ParsePublicKeys(append([]byte("# who\n\n"), ssh.MarshalAuthorizedKey(s)...)))(t)
	der := must.Get(x509.MarshalPKIXPublicKey(public))(t)
	block := must.Get(ParsePublicKeys(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})))(t)
	expect.Equal(t, line[0].ID(), block[0].ID(), "ID of the same key")
	return privateKeys(t, private)[0], line
}

func TestParseRejectsUnusableKeys(t *testing.T) {
	small, err := rsa.GenerateKey(rand.Reader, 2048)
	must.Succeed(t, err)
	curve, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	must.Succeed(t, err)
	texts := map[string][]byte{
		"nothing": nil, "no key": []byte("key"),
		"PKCS #8 with a passphrase": pem.EncodeToMemory(&pem.Block{Type: "ENCRYPTED PRIVATE KEY", Bytes: []byte("0")}),
		"sigstore's":                pem.EncodeToMemory(&pem.Block{Type: "ENCRYPTED SIGSTORE PRIVATE KEY", Bytes: []byte("0")}),
	}
	for name, k := range map[string]any{"RSA of 2048 bits": small, "P-384": curve} {
		der := must.Get(x509.MarshalPKCS8PrivateKey(k))(t)
		texts[name] = pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	}
	for name, text := range texts {
		if _, err := ParsePrivateKey(text, nil); !errors.Is(err, ErrKey) || errors.Is(err, ErrPassphrase) {
			t.Errorf("%s: %v", name, err)
		} else if strings.Contains(name, "PKCS") && !strings.Contains(err.Error(), "ssh-keygen -p") {
			t.Errorf("%s: the error does not say what to do: %v", name, err)
		}
	}
	_, lines := keys(t, rsaKey(t), rsaKey(t).Public())
	good := strings.TrimSpace(string(ssh.MarshalAuthorizedKey(lines[0].wire)))
	block := string(publicBlock(t, rsaKey(t).Public()))
	for _, text := range []string{
		"", "# nobody\n", "ssh-ed25519 AAAA", "-----BEGIN X-----\nAAAA\n-----END X-----\n",
		`expiry-time="20200101" ` + good, "cert-authority " + good, good + "\nrestrict " + good,
		block + good, block + "-----BEGIN PUBLIC KEY-----\n", string(publicBlock(t, small.Public())),
		"sk-ssh-ed25519@openssh.com " + base64.StdEncoding.EncodeToString(ssh.Marshal(struct {
			Name, Key, Application string
		}{"sk-ssh-ed25519@openssh.com", strings.Repeat("k", ed25519.PublicKeySize), "ssh:"})),
	} {
		expect.Error(t, expect.Err(ParsePublicKeys([]byte(text))), ErrKey, "%q", text)
	}
	// One file may hold several PEM blocks, also of the older form.
	older := pem.EncodeToMemory(
		&pem.Block{Type: "RSA PUBLIC KEY", Bytes: x509.MarshalPKCS1PublicKey(&rsaKey(t).PublicKey)})
	all, err := ParsePublicKeys(append(append([]byte("\n"), older...), block...))
	if err != nil || len(all) != 2 || all[0].ID() != lines[0].ID() || all[1].ID() != lines[0].ID() {
		t.Errorf("%d keys, %v; want %s twice", len(all), err, lines[0].ID())
	}
}

// rsaKey returns an RSA key that the tests share.
var rsaKey = func() func(*testing.T) *rsa.PrivateKey {
	generate := sync.OnceValues(func() (*rsa.PrivateKey, error) { return rsa.GenerateKey(rand.Reader, minRSA) })
	return func(t *testing.T) *rsa.PrivateKey {
		t.Helper()
		k := must.Get(generate())(t)
		return k
	}
}()

func publicBlock(t *testing.T, public any) []byte {
	t.Helper()
	der := must.Get(x509.MarshalPKIXPublicKey(public))(t)
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
}

func TestParsePrivateKeyNeedsThePassphrase(t *testing.T) {
	_, edwards, err := ed25519.GenerateKey(rand.Reader)
	must.Succeed(t, err)
	openssh, err := ssh.MarshalPrivateKeyWithPassphrase(edwards, "", []byte("secret"))
	must.Succeed(t, err)
	// What ssh-keygen made until 2018, and -m PEM makes today
	older, err := x509.EncryptPEMBlock(rand.Reader, "RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(rsaKey(t)),
		[]byte("secret"), x509.PEMCipherAES128)
	must.Succeed(t, err)
	curve, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must.Succeed(t, err)
	der, err := x509.MarshalECPrivateKey(curve)
	must.Succeed(t, err)
	olderCurve, err := x509.EncryptPEMBlock(rand.Reader, "EC PRIVATE KEY", der, []byte("secret"), x509.PEMCipherAES128)
	must.Succeed(t, err)
	for name, c := range map[string]struct {
		block *pem.Block
		tries int
	}{"OpenSSH": {openssh, 5}, "PEM": {older, 40}, "PEM of ECDSA": {olderCurve, 1500}} {
		text := pem.EncodeToMemory(c.block)
		if k, err := ParsePrivateKey(text, []byte("secret")); err != nil {
			t.Errorf("%s: %v", name, err)
		} else if _, err := Sign(t.Context(), reproducible(), k); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for i := range c.tries { // a wrong passphrase yields noise, and one in 256 has valid padding
			other := [][]byte{nil, {}, []byte("Secret"), []byte("secret\n"), []byte(strconv.Itoa(i))}[min(i, 4)]
			if _, err := ParsePrivateKey(text, other); !errors.Is(err, ErrKey) || !errors.Is(err, ErrPassphrase) {
				t.Errorf("%s: %q: %v", name, other, err)
			}
		}
	}
}

// Agents and sigstore sign by PKCS #1 v1.5, in-toto by PSS.
func TestVerifyAcceptsBothRSASchemes(t *testing.T) {
	_, public := keys(t, rsaKey(t), rsaKey(t).Public())
	data := []byte("data")
	sum := sha256.Sum256(data)
	plain := must.Get(rsa.SignPKCS1v15(nil, rsaKey(t), crypto.SHA256, sum[:]))(t)
	for _, salt := range []int{rsa.PSSSaltLengthEqualsHash, rsa.PSSSaltLengthAuto} {
		pss, err := rsa.SignPSS(rand.Reader, rsaKey(t), crypto.SHA256, sum[:], &rsa.PSSOptions{SaltLength: salt})
		must.Succeed(t, err)
		for _, signature := range [][]byte{plain, pss} {
			expect.Error(t, public[0].verify(data, signature), nil, "salt %d", salt)
			expect.That(t, public[0].verify([]byte("other"), signature) != nil,
				"verify accepts a signature of other data")
		}
	}
	weak := sha1.Sum(data)
	if signature, err := rsa.SignPKCS1v15(nil, rsaKey(t), crypto.SHA1, weak[:]); err != nil ||
		public[0].verify(data, signature) == nil {
		t.Errorf("verify accepts a SHA-1 signature, or %v", err)
	}
}

// Every reader must understand an envelope the same way, and its writer must not determine how long checking takes.
func TestOpenRejectsAmbiguousEnvelopes(t *testing.T) {
	private, public := keys(t, rsaKey(t), rsaKey(t).Public())
	text := must.Get(Sign(t.Context(), reproducible(), private))(t)
	var e dsse.Envelope
	must.Succeed(t, json.Unmarshal(text, &e))
	one := must.Get(json.Marshal(e.Signatures[0]))(t)
	many := func(n int) string {
		return strings.Replace(string(text), string(one), strings.Repeat(`{"sig":"AAAA"},`, n)+string(one), 1)
	}
	for name, other := range map[string]string{
		"duplicate payload":     strings.Replace(string(text), `"payload":`, `"payload":"e30=","payload":`, 1),
		"duplicate, other case": strings.Replace(string(text), `"payload":`, `"PAYLOAD":"e30=","payload":`, 1),
		"duplicate signature":   strings.Replace(string(text), `"sig":`, `"sig":"AAAA","sig":`, 1),
		"too many signatures":   many(maxSignatures),
	} {
		for _, keys := range [][]*Key{public, nil} {
			if _, _, err := Open(t.Context(), []byte(other), keys); other == string(text) ||
				!errors.Is(err, ErrStatement) {
				t.Errorf("%s, with %d keys: %v", name, len(keys), err)
			}
		}
	}
	for name, other := range map[string]string{
		"unknown field":        strings.Replace(string(text), `{`, `{"x":1,`, 1), // readers must ignore it by the specification
		"many signatures":      many(maxSignatures - 1),
		"signature by another": strings.Replace(string(text), `"signatures":[`, `"signatures":[{"keyid":"other","sig":"AAAA"},`, 1),
	} {
		if _, by, err := Open(t.Context(), []byte(other), public); err != nil || len(by) != 1 {
			t.Errorf("%s: by %q, %v", name, by, err)
		}
	}
}

func TestOpenSSHKeysAndAgentSign(t *testing.T) {
	tool := func(name string) string {
		path, err := exec.LookPath(name)
		if err != nil {
			sandboxtest.Unavailable(t, "tools", err)
		}
		return path
	}
	keygen, add, agent := tool("ssh-keygen"), tool("ssh-add"), tool("ssh-agent")
	dir := t.TempDir()
	socket := filepath.Join(dir, "agent")
	ctx, end := context.WithCancel(t.Context())
	running := exec.CommandContext(ctx, agent, "-D", "-a", socket)
	must.Succeed(t, running.Start())
	defer func() { end(); running.Wait() }()
	await(t, socket)
	for name, c := range map[string]struct {
		args       []string
		passphrase string
	}{
		"ed25519": {args: []string{"-t", "ed25519"}},
		"locked":  {[]string{"-t", "ed25519"}, "to be kept"},
		"ecdsa":   {args: []string{"-t", "ecdsa", "-b", "256"}},
		"rsa":     {args: []string{"-t", "rsa", "-b", "3072"}},
		"pem":     {[]string{"-t", "rsa", "-b", "3072", "-m", "PEM"}, "to be kept"},
	} {
		path := filepath.Join(dir, name)
		if out, err := exec.Command(keygen, append(c.args, "-q", "-N", c.passphrase, "-f", path)...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		var text [2][]byte
		for i, file := range []string{path, path + ".pub"} {
			var err error
			if text[i], err = os.ReadFile(file); err != nil {
				t.Fatal(err)
			}
		}
		k, err := ParsePrivateKey(text[0], []byte(c.passphrase))
		must.Succeed(t, err)
		out, err := exec.Command(keygen, "-l", "-f", path+".pub").Output()
		if err != nil || !strings.Contains(string(out), " "+k.ID()+" ") {
			t.Errorf("%s is not in %q, %v", k.ID(), out, err)
		}
		public, err := ParsePublicKeys(text[1])
		must.Succeed(t, err)
		opens(t, k, public)
		if c.passphrase != "" {
			continue
		}
		if _, err := AgentKey(t.Context(), socket, public[0]); !errors.Is(err, errAgent) ||
			!strings.Contains(err.Error(), k.ID()) {
			t.Errorf("%s, not in the agent: got %v, want errAgent", name, err)
		}
		loaded := exec.Command(add, "-q", path)
		loaded.Env = append(os.Environ(), "SSH_AUTH_SOCK="+socket)
		if out, err := loaded.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if k, err = AgentKey(t.Context(), socket, public[0]); err != nil {
			t.Fatal(err)
		}
		opens(t, k, public)
		large := reproducible()
		large.Reproducibility.Causes = []string{strings.Repeat("x", 256<<10)}
		if _, err := Sign(t.Context(), large, k); !errors.Is(err, errAgent) ||
			!strings.Contains(err.Error(), "sign with the key file") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// await waits for a listener at a socket.
func await(t *testing.T, socket string) {
	t.Helper()
	must.Hold(t, "a listener at "+socket, func() bool {
		conn, err := net.Dial("unix", socket)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
}

// opens checks that public verifies a signature by k.
func opens(t *testing.T, k *Key, public []*Key) {
	t.Helper()
	signed := must.Get(Sign(t.Context(), provenance(), k))(t)
	if _, by, err := Open(t.Context(), signed, public); err != nil || len(by) != 1 || by[0] != k.ID() {
		t.Errorf("by %q, %v", by, err)
	}
}

// An agent that gives anything but the signature that was asked for has signed nothing.
func TestAgentIsNotBelieved(t *testing.T) {
	_, edwards, err := ed25519.GenerateKey(rand.Reader)
	must.Succeed(t, err)
	for name, c := range map[string]struct {
		private any
		spoil   func(*ssh.Signature)
		good    bool
	}{
		"Ed25519":        {edwards, func(*ssh.Signature) {}, true},
		"RSA":            {rsaKey(t), func(*ssh.Signature) {}, true},
		"another text":   {edwards, func(s *ssh.Signature) { s.Blob[0] ^= 1 }, false},
		"nothing":        {edwards, func(s *ssh.Signature) { s.Blob = nil }, false},
		"another type":   {edwards, func(s *ssh.Signature) { s.Format = ssh.KeyAlgoECDSA256 }, false},
		"RSA with SHA-1": {rsaKey(t), func(s *ssh.Signature) { s.Format = ssh.KeyAlgoRSA }, false},
		"too long":       {rsaKey(t), func(s *ssh.Signature) { s.Blob = append(s.Blob, 0) }, false},
	} {
		ring := &falseAgent{Agent: agent.NewKeyring(), spoil: c.spoil}
		must.Succeed(t, ring.Add(agent.AddedKey{PrivateKey: c.private}))
		socket := filepath.Join(t.TempDir(), "agent")
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
		_, public := keys(t, c.private, c.private.(crypto.Signer).Public())
		k := must.Get(AgentKey(t.Context(), socket, public[0]))(t)
		if _, err := Sign(t.Context(), provenance(), k); (err == nil) != c.good {
			t.Errorf("%s: %v", name, err)
		}
		ctx, end := context.WithCancel(t.Context())
		end()
		expect.Error(t, expect.Err(Sign(ctx, provenance(), k)), context.Canceled, "%s: after the end", name)
	}
	_, public := keys(t, edwards, edwards.Public())
	expect.Error(t, expect.Err(AgentKey(t.Context(), filepath.Join(t.TempDir(), "absent"), public[0])), errAgent,
		"without an agent")
}

// A falseAgent spoils the signatures of an agent.
type falseAgent struct {
	agent.Agent
	spoil func(*ssh.Signature)
}

func (a *falseAgent) SignWithFlags(key ssh.PublicKey, data []byte, flags agent.SignatureFlags) (*ssh.Signature, error) {
	s, err := a.Agent.(agent.ExtendedAgent).SignWithFlags(key, data, flags)
	if err == nil {
		a.spoil(s)
	}
	return s, err
}

func (a *falseAgent) Extension(string, []byte) ([]byte, error) {
	return nil, agent.ErrExtensionUnsupported
}

func FuzzOpen(f *testing.F) {
	for _, s := range []*Statement{reproducible(), provenance()} {
		text := must.Get(s.Encode())(f)
		f.Add(text)
	}
	f.Add([]byte(`{"payloadType":"application/vnd.in-toto+json","payload":"e30=","signatures":[{"sig":""}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		s, _, err := Open(t.Context(), text, nil)
		if err != nil {
			expect.Error(t, err, ErrStatement)
			return
		}
		expect.Error(t, expect.Err(s.Encode()), nil, "what was read cannot be written")
	})
}

// Equal runs are the same only if something varied: a condition, or the server.
func TestUnvariedIsNotSame(t *testing.T) {
	for name, c := range map[string]struct {
		change func(second *Run)
		want   string
	}{
		"a condition":       {func(second *Run) { second.On = "" }, Same},
		"the server":        {func(second *Run) { second.Varied = nil }, Same},
		"only the worker":   {func(second *Run) { second.Varied, second.On = nil, "" }, Unvaried},
		"and it differs":    {func(second *Run) { second.Varied, second.On, second.Stdout = nil, "", Descriptor{} }, Differs},
		"and the exit code": {func(second *Run) { second.Varied, second.On, second.ExitCode = nil, "", 1 }, Flaky},
	} {
		for _, verdict := range []string{Same, Unvaried, Differs, Flaky} {
			s := reproducible()
			s.Reproducibility.Runs[1].On = "elsewhere"
			c.change(&s.Reproducibility.Runs[1])
			s.Reproducibility.Verdict = verdict
			if _, err := s.Encode(); (err == nil) != (verdict == c.want) {
				t.Errorf("%s varies, verdict %s: got %v, want only %s accepted", name, verdict, err, c.want)
			}
		}
	}
}

// Earlier statements stay readable, but what they call same is unvaried if nothing varied.
func TestVersion1IsRead(t *testing.T) {
	for name, c := range map[string]struct {
		change func(second *Run)
		want   string
	}{
		"varied":        {func(second *Run) { second.Worker = "one" }, Same},
		"other workers": {func(second *Run) { second.Varied = nil }, Same},
		"unvaried":      {func(second *Run) { second.Varied, second.Worker = nil, "one" }, Unvaried},
	} {
		s := reproducible()
		s.Reproducibility.Runs[1].Varied = []string{"time +1d"}
		text, err := s.Encode()
		must.Succeed(t, err)
		var w wire
		var r Reproducibility
		must.Succeed(t, errors.Join(json.Unmarshal(text, &w), json.Unmarshal(w.Predicate, &r)))
		c.change(&r.Runs[1])
		w.PredicateType = reproducibilityV1
		for verdict, good := range map[string]bool{Same: true, Unvaried: false, Differs: false} {
			r.Verdict = verdict
			if w.Predicate, err = json.Marshal(r); err != nil {
				t.Fatal(err)
			}
			if text, err = json.Marshal(w); err != nil {
				t.Fatal(err)
			}
			got, err := decode(text)
			if (err == nil) != good || good && got.Reproducibility.Verdict != c.want {
				t.Errorf("%s, stated as %s: got %v, %v, want %s from same only", name, verdict, got, err, c.want)
			}
		}
	}
}
