// SPDX-License-Identifier: Apache-2.0

// Package attest writes and checks statements about actions, in the form that in-toto gives them
// (https://github.com/in-toto/attestation, Statement v1): that an action was run several times and what came of it,
// and how one result came about (SLSA provenance v1). A statement says what one run of Cloister saw. A signature says
// whose run that was, and nothing else does.
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
	// ReproducibilityType is that of a Reproducibility, ProvenanceType that of a Provenance.
	ReproducibilityType = "https://github.com/cloister-build/cloister/blob/main/docs/attest.md#reproducibility-v1"
	ProvenanceType      = "https://slsa.dev/provenance/v1"
	// BuildType says how the parameters of a Provenance are to be read.
	BuildType = "https://github.com/cloister-build/cloister/blob/main/docs/attest.md#action-v1"
)

// Errors of statements.
var (
	// ErrStatement says that a text is no statement, or one that contradicts itself; its text says where.
	ErrStatement = errors.New("not a valid statement")
	// ErrSignature says that a statement is not signed by any of the keys that are accepted.
	ErrSignature = errors.New("not signed by an accepted key")
	// ErrKey says that a key cannot be used.
	ErrKey = errors.New("unusable key")
	// ErrPassphrase says that a private key is locked by a passphrase, which was not given.
	ErrPassphrase = errors.New("the passphrase of the key is needed")
	// ErrAgent says that no ssh-agent signs by a key.
	ErrAgent = errors.New("ssh-agent does not sign")
)

// A Descriptor names some bytes (in-toto ResourceDescriptor v1). Digest maps the name of a digest function, in lower
// case, to the hash in hexadecimal.
type Descriptor struct {
	Name        string            `json:"name,omitempty"`
	URI         string            `json:"uri,omitempty"`
	Digest      map[string]string `json:"digest,omitempty"`
	MediaType   string            `json:"mediaType,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

func (d *Descriptor) equal(e *Descriptor) bool {
	return d.Name == e.Name && d.MediaType == e.MediaType && maps.Equal(d.Digest, e.Digest) && maps.Equal(d.Annotations, e.Annotations)
}

// A Statement says something about its subjects. Exactly one of the predicates is set.
type Statement struct {
	// Subjects are the outputs of the action, those of the first run; or the action, if it has none.
	Subjects        []Descriptor
	Reproducibility *Reproducibility
	Provenance      *Provenance
}

// A Reproducibility says what came of running one action several times.
type Reproducibility struct {
	// Verdict is Same, Differs or Flaky.
	Verdict string `json:"verdict"`
	// Action is the action. Tool is the version of Cloister.
	Action Descriptor `json:"action"`
	Tool   string     `json:"tool"`
	// Runs are in the order in which they were made, two at least.
	Runs []Run `json:"runs"`
	// NotVaried are the factors that were held as usual, each with the reason.
	NotVaried map[string]string `json:"notVaried,omitempty"`
	// Causes are what explains the differences, in the order of the report: "libapp.a: member util.o: mtime: timestamp".
	Causes []string `json:"causes,omitempty"`
}

// The verdicts.
const (
	Same    = "same"
	Differs = "differs"
	Flaky   = "flaky exit"
)

// A Run is one of the runs.
type Run struct {
	Worker string `json:"worker,omitempty"`
	// Varied are what the run noticed otherwise than a usual one, each beginning with the name of its factor.
	Varied []string `json:"varied,omitempty"`
	// StableHash is that of the run's manifest, "" where there is none.
	StableHash string    `json:"stableHash,omitempty"`
	StartedOn  time.Time `json:"startedOn,omitzero"`
	FinishedOn time.Time `json:"finishedOn,omitzero"`
	ExitCode   int32     `json:"exitCode"`
	// Code is how the run ended, if not well, as the API has it: "DeadlineExceeded".
	Code string `json:"code,omitempty"`
	// Outputs are sorted by name. Stdout and Stderr have no name.
	Outputs []Descriptor `json:"outputs"`
	Stdout  Descriptor   `json:"stdout,omitzero"`
	Stderr  Descriptor   `json:"stderr,omitzero"`
}

// A Provenance says how one result came about (https://slsa.dev/spec/v1.1/provenance).
type Provenance struct {
	BuildDefinition BuildDefinition `json:"buildDefinition"`
	RunDetails      RunDetails      `json:"runDetails"`
}

// A BuildDefinition is what was to be done.
type BuildDefinition struct {
	BuildType string `json:"buildType"`
	// ExternalParameters are the action's: what the client decided.
	ExternalParameters Parameters `json:"externalParameters"`
	// InternalParameters are the worker's: what its operator decided.
	InternalParameters map[string]string `json:"internalParameters,omitempty"`
	// ResolvedDependencies are action, command and input root, the programs of the host that were executed, and the
	// source revision, as far as they are known.
	ResolvedDependencies []Descriptor `json:"resolvedDependencies"`
}

// Parameters are what an action states.
type Parameters struct {
	Action           string   `json:"action"`
	Instance         string   `json:"instance,omitempty"`
	Arguments        []string `json:"arguments"`
	Environment      []string `json:"environment,omitempty"`
	WorkingDirectory string   `json:"workingDirectory,omitempty"`
	OutputPaths      []string `json:"outputPaths,omitempty"`
	Platform         []string `json:"platform,omitempty"`
}

// RunDetails are what was done.
type RunDetails struct {
	Builder    Builder      `json:"builder"`
	Metadata   Metadata     `json:"metadata,omitzero"`
	Byproducts []Descriptor `json:"byproducts,omitempty"`
}

// A Builder is who is trusted to have done it. Version maps a component to its version.
type Builder struct {
	ID      string            `json:"id"`
	Version map[string]string `json:"version,omitempty"`
}

// Metadata is about one run.
type Metadata struct {
	InvocationID string    `json:"invocationId,omitempty"`
	StartedOn    time.Time `json:"startedOn,omitzero"`
	FinishedOn   time.Time `json:"finishedOn,omitzero"`
}

// wire is a Statement as it is written.
type wire struct {
	Type          string          `json:"_type"`
	Subject       []Descriptor    `json:"subject"`
	PredicateType string          `json:"predicateType"`
	Predicate     json.RawMessage `json:"predicate"`
}

// Encode returns the statement as JSON. It fails with ErrStatement if it would not pass Validate.
func (s *Statement) Encode() ([]byte, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	w := wire{Type: statementType, Subject: s.Subjects, PredicateType: ReproducibilityType}
	var predicate any = s.Reproducibility
	if s.Provenance != nil {
		w.PredicateType, predicate = ProvenanceType, s.Provenance
	}
	var err error
	if w.Predicate, err = json.Marshal(predicate); err != nil {
		return nil, err
	}
	return json.Marshal(w)
}

// Decode is the inverse of Encode. It fails with ErrStatement for what is not a statement of the two kinds, has fields
// that these do not have, or contradicts itself.
func Decode(text []byte) (*Statement, error) {
	var w wire
	err := strict(text, &w)
	if err == nil {
		err = unambiguous(text)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStatement, err)
	}
	if w.Type != statementType {
		return nil, fmt.Errorf("%w: its _type is %q, not %q", ErrStatement, w.Type, statementType)
	}
	s := &Statement{Subjects: w.Subject}
	var predicate any
	switch w.PredicateType {
	case ReproducibilityType:
		s.Reproducibility = &Reproducibility{}
		predicate = s.Reproducibility
	case ProvenanceType:
		s.Provenance = &Provenance{}
		predicate = s.Provenance
	default:
		return nil, fmt.Errorf("%w: its predicateType is %q, neither %q nor %q", ErrStatement, w.PredicateType, ReproducibilityType, ProvenanceType)
	}
	if err := strict(w.Predicate, predicate); err != nil {
		return nil, fmt.Errorf("%w: predicate: %w", ErrStatement, err)
	}
	return s, s.Validate()
}

// strict decodes one JSON value with no field that v lacks, and nothing after it.
func strict(text []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); err != io.EOF { // More takes a stray bracket for the end of something
		return errors.New("something follows it")
	}
	return nil
}

// unambiguous fails if an object of a JSON value has a key twice, or two that differ in case: of these one reader takes the
// first, another the last, and package json does not tell them apart.
func unambiguous(text []byte) error {
	// An object has keys, and waits for a value after each.
	type level struct {
		keys map[string]bool
		wait bool
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
		case ok && in.keys != nil && !in.wait:
			folded := strings.ToLower(strings.ToUpper(key)) // one of the two alone leaves some letters as they are
			if in.keys[folded] {
				return fmt.Errorf("%.100q is there twice", key)
			}
			in.keys[folded], in.wait = true, true
			continue
		case token == json.Delim('}') || token == json.Delim(']'):
			open = open[:len(open)-1]
			continue
		case token == json.Delim('{'):
			open = append(open, &level{keys: map[string]bool{}})
		case token == json.Delim('['):
			open = append(open, &level{})
		}
		in.wait = false
	}
}

// Validate fails with ErrStatement if the statement contradicts itself: a verdict that does not follow from the runs,
// subjects that are not the outputs of the first run, an action whose name is not its digest, or a digest that is none.
func (s *Statement) Validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrStatement, fmt.Sprintf(format, args...))
	}
	if len(s.Subjects) == 0 {
		return bad("it is about nothing: it has no subject")
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
		return bad("it has not exactly one predicate")
	case r == nil && s.Provenance.BuildDefinition.BuildType != BuildType:
		return bad("its build type is %q, not %q", s.Provenance.BuildDefinition.BuildType, BuildType)
	case r == nil:
		return nil
	case len(r.Runs) < 2:
		return bad("%d runs say nothing about reproducibility", len(r.Runs))
	case !r.Action.named():
		return bad("the action is called %q, and its digest is another", r.Action.Name)
	case r.Verdict != r.follows():
		return bad("the verdict is %q, and from the runs follows %q", r.Verdict, r.follows())
	case !slices.EqualFunc(s.Subjects, r.Subjects(), func(a, b Descriptor) bool { return a.equal(&b) }):
		return bad("the subjects are not the outputs of the first run")
	}
	return nil
}

// Subjects returns what a statement about r is about: the outputs of the first run or, if it has none, the action.
func (r *Reproducibility) Subjects() []Descriptor {
	if outputs := r.Runs[0].Outputs; len(outputs) > 0 {
		return outputs
	}
	return []Descriptor{r.Action}
}

// follows returns the verdict that follows from the runs.
func (r *Reproducibility) follows() string {
	verdict := Same
	first := &r.Runs[0]
	for i := range r.Runs[1:] {
		run := &r.Runs[i+1]
		if run.ExitCode != first.ExitCode || run.Code != first.Code {
			return Flaky
		}
		if !run.Stdout.equal(&first.Stdout) || !run.Stderr.equal(&first.Stderr) ||
			!slices.EqualFunc(run.Outputs, first.Outputs, func(a, b Descriptor) bool { return a.equal(&b) }) {
			verdict = Differs
		}
	}
	return verdict
}

// named reports whether the name of d is its digest, as a command line states it: "HASH/SIZE", or "FUNCTION:HASH/SIZE".
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
			return fmt.Errorf("%s %q is no hash", function, hash)
		}
	}
	return nil
}
