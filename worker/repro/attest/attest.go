// SPDX-License-Identifier: Apache-2.0

// Package attest writes and checks in-toto statements (https://github.com/in-toto/attestation, Statement v1) about
// actions: whether several runs of an action produced the same outputs, and how one result was produced (SLSA
// provenance v1). A statement records what one run of Cloister observed. Only a signature proves whose run it was.
package attest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
)

// The types that statements name.
const (
	statementType = "https://in-toto.io/Statement/v1"
	// reproducibilityType and provenanceType are the predicate types of Reproducibility and Provenance.
	reproducibilityType = "https://github.com/cloister-build/cloister/blob/main/docs/attest.md#reproducibility-v2"
	provenanceType      = "https://slsa.dev/provenance/v1"
	// reproducibilityV1 is the type of earlier statements, which called unvaried runs the same.
	reproducibilityV1 = "https://github.com/cloister-build/cloister/blob/main/docs/attest.md#reproducibility-v1"
	// BuildType defines the meaning of a Provenance's parameters.
	BuildType = "https://github.com/cloister-build/cloister/blob/main/docs/attest.md#action-v1"
)

// Errors of this package.
var (
	// ErrStatement means that a text is not a statement or contradicts itself.
	ErrStatement = errors.New("not a valid statement")
	// ErrSignature means that none of the accepted keys signed a statement.
	ErrSignature = errors.New("not signed by an accepted key")
	// ErrKey means that a key cannot be used.
	ErrKey = errors.New("unusable key")
	// ErrPassphrase means that the passphrase of a private key is missing or wrong.
	ErrPassphrase = errors.New("the key needs a passphrase")
	// errAgent means that no ssh-agent signs with a key.
	errAgent = errors.New("ssh-agent cannot sign")
)

var errNoKey = fmt.Errorf("%w: the Key is missing", ErrKey)

// A Descriptor identifies a file or other bytes (in-toto ResourceDescriptor v1). Digest maps the name of a digest
// function in lower case to a hash in hexadecimal.
type Descriptor struct {
	Name        string            `json:"name,omitempty"`
	URI         string            `json:"uri,omitempty"`
	Digest      map[string]string `json:"digest,omitempty"`
	MediaType   string            `json:"mediaType,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

func (d *Descriptor) equal(e *Descriptor) bool {
	return d.Name == e.Name && d.MediaType == e.MediaType && maps.Equal(d.Digest, e.Digest) &&
		maps.Equal(d.Annotations, e.Annotations)
}

// A Statement has subjects and exactly one predicate about them.
type Statement struct {
	// Subjects are the outputs of the first run or, if it has none, the action.
	Subjects        []Descriptor
	Reproducibility *Reproducibility
	Provenance      *Provenance
}

// Reproducibility is the result of running one action several times.
type Reproducibility struct {
	// Verdict is Same, Unvaried, Differs or Flaky. It follows from the runs.
	Verdict string `json:"verdict"`
	// Tool is the version of Cloister.
	Action Descriptor `json:"action"`
	Tool   string     `json:"tool"`
	// Runs are at least two, in chronological order.
	Runs []Run `json:"runs"`
	// NotVaried maps each factor that was not varied to the reason.
	NotVaried map[string]string `json:"notVaried,omitempty"`
	// Causes explain the differences, in the order of the report: "libapp.a: member util.o: mtime: timestamp".
	Causes []string `json:"causes,omitempty"`
}

// The verdicts.
const (
	Same     = "same"
	Unvaried = "unvaried" // equal runs without any variation: they do not show that the action is reproducible
	Differs  = "differs"
	Flaky    = "flaky exit"
)

// A Run is one run of the action.
type Run struct {
	Worker string `json:"worker,omitempty"`
	// On names the server that ran it, if several are compared.
	On string `json:"on,omitempty"`
	// Varied lists the varied conditions, each beginning with the name of its factor.
	Varied []string `json:"varied,omitempty"`
	// StableHash is that of the run's manifest; "" if there is none.
	StableHash string    `json:"stableHash,omitempty"`
	StartedOn  time.Time `json:"startedOn,omitzero"`
	FinishedOn time.Time `json:"finishedOn,omitzero"`
	ExitCode   int32     `json:"exitCode"`
	// Code is the status code of the API unless it is OK: "DeadlineExceeded".
	Code string `json:"code,omitempty"`
	// Outputs are sorted by name. Stdout and Stderr have no name.
	Outputs []Descriptor `json:"outputs"`
	Stdout  Descriptor   `json:"stdout,omitzero"`
	Stderr  Descriptor   `json:"stderr,omitzero"`
}

// Provenance records how one result was produced (https://slsa.dev/spec/v1.1/provenance).
type Provenance struct {
	BuildDefinition BuildDefinition `json:"buildDefinition"`
	RunDetails      RunDetails      `json:"runDetails"`
}

// A BuildDefinition describes the requested work.
type BuildDefinition struct {
	BuildType string `json:"buildType"`
	// ExternalParameters were chosen by the client.
	ExternalParameters Parameters `json:"externalParameters"`
	// InternalParameters were chosen by the worker's operator.
	InternalParameters map[string]string `json:"internalParameters,omitempty"`
	// ResolvedDependencies are the action, its command and input root and, if known, the executed programs of the host
	// and the source revision.
	ResolvedDependencies []Descriptor `json:"resolvedDependencies"`
}

// Parameters are the contents of an action.
type Parameters struct {
	Action           string   `json:"action"`
	Instance         string   `json:"instance,omitempty"`
	Arguments        []string `json:"arguments"`
	Environment      []string `json:"environment,omitempty"`
	WorkingDirectory string   `json:"workingDirectory,omitempty"`
	OutputPaths      []string `json:"outputPaths,omitempty"`
	Platform         []string `json:"platform,omitempty"`
}

// RunDetails describe the performed work.
type RunDetails struct {
	Builder    Builder      `json:"builder"`
	Metadata   Metadata     `json:"metadata,omitzero"`
	Byproducts []Descriptor `json:"byproducts,omitempty"`
}

// A Builder is the trusted party that did the work. Version maps components to versions.
type Builder struct {
	ID      string            `json:"id"`
	Version map[string]string `json:"version,omitempty"`
}

// Metadata describes one run.
type Metadata struct {
	InvocationID string    `json:"invocationId,omitempty"`
	StartedOn    time.Time `json:"startedOn,omitzero"`
	FinishedOn   time.Time `json:"finishedOn,omitzero"`
}

// wire is the JSON form of a Statement.
type wire struct {
	Type          string          `json:"_type"`
	Subject       []Descriptor    `json:"subject"`
	PredicateType string          `json:"predicateType"`
	Predicate     json.RawMessage `json:"predicate"`
}

// Encode returns the statement as JSON. It fails with ErrStatement if the statement is invalid.
func (s *Statement) Encode() ([]byte, error) {
	if err := s.validate(); err != nil {
		return nil, err
	}
	w := wire{Type: statementType, Subject: s.Subjects, PredicateType: reproducibilityType}
	var predicate any = s.Reproducibility
	if s.Provenance != nil {
		w.PredicateType, predicate = provenanceType, s.Provenance
	}
	var err error
	if w.Predicate, err = json.Marshal(predicate); err != nil {
		return nil, err
	}
	return json.Marshal(w)
}

// decode is the inverse of Encode. It fails with ErrStatement if the text is not a statement with one of the two
// predicates, has unknown fields, or contradicts itself. In an earlier statement, which has no On, workers stand for
// servers, and the verdict on equal runs without any variation becomes Unvaried.
func decode(text []byte) (*Statement, error) {
	var w wire
	err := strict(text, &w)
	if err == nil {
		err = unambiguous(text)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStatement, err)
	}
	if w.Type != statementType {
		return nil, fmt.Errorf("%w: _type %q, want %q", ErrStatement, w.Type, statementType)
	}
	s := &Statement{Subjects: w.Subject}
	var predicate any
	switch w.PredicateType {
	case reproducibilityType, reproducibilityV1:
		s.Reproducibility = &Reproducibility{}
		predicate = s.Reproducibility
	case provenanceType:
		s.Provenance = &Provenance{}
		predicate = s.Provenance
	default:
		return nil, fmt.Errorf("%w: predicateType %q, want %q or %q", ErrStatement, w.PredicateType,
			reproducibilityType, provenanceType)
	}
	if err := strict(w.Predicate, predicate); err != nil {
		return nil, fmt.Errorf("%w: predicate: %w", ErrStatement, err)
	}
	if w.PredicateType == reproducibilityV1 {
		if err := s.Reproducibility.upgrade(); err != nil {
			return nil, fmt.Errorf("%w: predicate: %w", ErrStatement, err)
		}
	}
	return s, s.validate()
}

// upgrade changes what was decoded as reproducibilityV1 to the current type.
func (r *Reproducibility) upgrade() error {
	if r.Verdict == Unvaried || slices.ContainsFunc(r.Runs, func(run Run) bool { return run.On != "" }) {
		return errors.New("a reproducibility-v1 has neither the verdict unvaried nor runs with on")
	}
	for i := range r.Runs {
		r.Runs[i].On = r.Runs[i].Worker
	}
	if r.Verdict == Same && len(r.Runs) > 0 && r.computed() == Unvaried {
		r.Verdict = Unvaried
	}
	return nil
}

// strict decodes one JSON value. It rejects unknown fields and text after the value.
func strict(text []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); err != io.EOF { // Decoder.More would accept a stray bracket
		return errors.New("text after the JSON value")
	}
	return nil
}

// unambiguous fails if an object in a JSON text has two keys that are equal or differ in case only: some readers take
// the first, others the last.
func unambiguous(text []byte) error {
	type level struct {
		keys      map[string]bool // nil in an array
		wantValue bool
	}
	open := []*level{{}}
	for d := json.NewDecoder(bytes.NewReader(text)); ; {
		token, err := d.Token()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		in := open[len(open)-1]
		switch key, ok := token.(string); {
		case ok && in.keys != nil && !in.wantValue:
			folded := strings.ToLower(strings.ToUpper(key)) // either alone does not change some letters
			if in.keys[folded] {
				return fmt.Errorf("duplicate key %.100q", key)
			}
			in.keys[folded], in.wantValue = true, true
			continue
		case token == json.Delim('}') || token == json.Delim(']'):
			open = open[:len(open)-1]
			continue
		case token == json.Delim('{'):
			open = append(open, &level{keys: map[string]bool{}})
		case token == json.Delim('['):
			open = append(open, &level{})
		}
		in.wantValue = false
	}
}

// validate fails with ErrStatement if the statement contradicts itself: the verdict does not follow from the runs, the
// subjects are not the outputs of the first run, the action's name is not its digest, or a digest is malformed.
func (s *Statement) validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrStatement, fmt.Sprintf(format, args...))
	}
	if len(s.Subjects) == 0 {
		return bad("no subject")
	}
	for i := range s.Subjects {
		if d := &s.Subjects[i]; d.Name == "" || len(d.Digest) == 0 {
			return bad("subject %d has no name or no digest", i)
		}
		if err := s.Subjects[i].validate(); err != nil {
			return bad("subject %q: %v", s.Subjects[i].Name, err)
		}
	}
	switch r := s.Reproducibility; {
	case (r == nil) == (s.Provenance == nil):
		return bad("it needs exactly one predicate")
	case r == nil && s.Provenance.BuildDefinition.BuildType != BuildType:
		return bad("build type %q, want %q", s.Provenance.BuildDefinition.BuildType, BuildType)
	case r == nil:
		return nil
	case len(r.Runs) < 2:
		return bad("%d runs, want at least 2", len(r.Runs))
	case !r.Action.named():
		return bad("the action's name %q is not its digest", r.Action.Name)
	case r.Verdict != r.computed():
		return bad("the verdict is %q, but the runs show %q", r.Verdict, r.computed())
	case !slices.EqualFunc(s.Subjects, r.Subjects(), func(a, b Descriptor) bool { return a.equal(&b) }):
		return bad("the subjects are not the outputs of the first run")
	}
	return nil
}

// Subjects returns the outputs of the first run or, if it has none, the action.
func (r *Reproducibility) Subjects() []Descriptor {
	if outputs := r.Runs[0].Outputs; len(outputs) > 0 {
		return outputs
	}
	return []Descriptor{r.Action}
}

// computed returns the verdict that follows from the runs.
func (r *Reproducibility) computed() string {
	verdict := Unvaried
	first := &r.Runs[0]
	for i := range r.Runs {
		run := &r.Runs[i]
		if run.ExitCode != first.ExitCode || run.Code != first.Code {
			return Flaky
		}
		if !run.Stdout.equal(&first.Stdout) || !run.Stderr.equal(&first.Stderr) ||
			!slices.EqualFunc(run.Outputs, first.Outputs, func(a, b Descriptor) bool { return a.equal(&b) }) {
			verdict = Differs
		}
		if verdict == Unvaried && (len(run.Varied) > 0 || run.On != first.On) {
			verdict = Same
		}
	}
	return verdict
}

// named reports whether d is named by its digest: "HASH/SIZE" or "FUNCTION:HASH/SIZE".
func (d *Descriptor) named() bool {
	hash, _, _ := strings.Cut(d.Name, "/")
	_, other, ok := strings.Cut(hash, ":")
	for _, h := range d.Digest {
		if len(d.Digest) == 1 && (h == hash || ok && h == other) {
			return true
		}
	}
	return false
}

func (d *Descriptor) validate() error {
	for function, hash := range d.Digest {
		if len(hash) < 32 || len(hash) > 128 || strings.Trim(hash, "0123456789abcdef") != "" {
			return fmt.Errorf("invalid %s hash %q", function, hash)
		}
	}
	return nil
}
