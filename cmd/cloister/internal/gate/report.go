// SPDX-License-Identifier: Apache-2.0

package gate

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
)

// reportFile is the name of the report in the evidence, and reportFormat its version.
const (
	reportFile   = "report.json"
	reportFormat = "cloister-gate-report v1"
)

// The verdicts on a step, and on all steps.
const (
	clean       = "clean"
	unseen      = "no violation seen" // without a sandbox, where the observer may miss one
	violated    = "violation"
	failed      = "failed"
	timedOut    = "timeout"
	impossible  = "impossible" // this machine cannot run the step, or not as the mode requires
	interrupted = "interrupted"
	notRun      = "not run"
)

// A Report is the content of report.json. Nothing in it differs between two runs of one commit on one machine, unless
// the steps do.
type Report struct {
	Format   string       `json:"format"`
	Revision string       `json:"revision"`
	Policy   policyReport `json:"policy"`
	Mode     string       `json:"mode"`
	Verdict  string       `json:"verdict"`
	ExitCode int          `json:"exit_code"`
	Message  string       `json:"message,omitempty"` // why the steps could not run
	Sandbox  boxReport    `json:"sandbox"`
	Steps    []stepReport `json:"steps"`
}

type policyReport struct {
	File   string `json:"file"`
	SHA256 string `json:"sha256"`
}

// boxReport describes the sandbox of all steps.
type boxReport struct {
	Tier        string   `json:"tier"`
	Layers      []string `json:"layers"`
	Observed    bool     `json:"observed"`           // network system calls are recorded
	Observer    string   `json:"observer,omitempty"` // what replaces the sandbox: "strace" or "ss"
	NotEnforced []string `json:"not_enforced"`
}

type stepReport struct {
	ID         string      `json:"id"`
	Line       int         `json:"line"` // in the policy
	Command    []string    `json:"command"`
	Inputs     string      `json:"inputs"` // "commit HASH" or "directory HASH"
	Listen     bool        `json:"listen"` // permitted on loopback
	Verdict    string      `json:"verdict"`
	ExitCode   int         `json:"exit_code"`
	Message    string      `json:"message,omitempty"`
	Violations []violation `json:"violations"`
	Exceptions []use       `json:"exceptions"`
	Denied     []string    `json:"denied,omitempty"` // other denials, of a step that failed
}

// String returns a description of the sandbox for people.
func (b *boxReport) String() string { return b.Tier + "; " + b.observation() }

func (b *boxReport) observation() string {
	switch {
	case b.Observer == strace.program:
		return "nothing is prevented, and strace records network system calls"
	case b.Observer != "":
		return "nothing is prevented, and ss lists open sockets, but only at intervals"
	case !b.Observed:
		return "network system calls are not recorded"
	}
	return "network system calls are recorded"
}

// Count returns the number of violations of all steps.
func (r *Report) Count() (n int) {
	for i := range r.Steps {
		n += len(r.Steps[i].Violations)
	}
	return n
}

// markdown returns the report for a person.
func (r *Report) markdown() string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("# Hermetic CI gate: %s\n", r.Verdict)
	line("| | |\n|---|---|")
	line("| revision | `%s` |", r.Revision)
	line("| policy | `%s` (SHA-256 `%.12s`) |", r.Policy.File, r.Policy.SHA256)
	line("| mode | %s |", r.Mode)
	observation := r.Sandbox.observation()
	if !r.Sandbox.Observed {
		observation = "**" + observation + "**"
	}
	line("| sandbox | %s; %s |", r.Sandbox.Tier, observation)
	if n := r.Sandbox.NotEnforced; len(n) > 0 {
		line("| not enforced | %s |", strings.Join(n, ", "))
	}
	if r.Message != "" {
		line("\n%s", r.Message)
	}
	line("\n| step | verdict | exit code | violations | allowed connections |\n|---|---|---|---|---|")
	for i := range r.Steps {
		s := &r.Steps[i]
		uses := 0
		for _, u := range s.Exceptions {
			uses += u.Connections
		}
		line("| %s | %s | %d | %d | %d |", s.ID, s.Verdict, s.ExitCode, len(s.Violations), uses)
	}
	for i := range r.Steps {
		s := &r.Steps[i]
		if len(s.Violations)+len(s.Exceptions)+len(s.Denied) == 0 && s.Message == "" {
			continue
		}
		line("\n## %s\n\n    %s\n", s.ID, render.QuoteAll(s.Command))
		if s.Message != "" {
			line("- %s", s.Message)
		}
		for _, v := range s.Violations {
			line("- **%s**: %s", v.Kind, v.Text)
		}
		for _, u := range s.Exceptions {
			line("- exception: %s:%d, %d connections (%d failed); %s, until %s: %s",
				u.Host, u.Port, u.Connections, u.Failed, u.Owner, u.Expires, u.Reason)
		}
		for _, d := range s.Denied {
			line("- %s", d)
		}
	}
	return b.String()
}

// An evidence is a directory of files that becomes visible when it is complete.
type evidence struct {
	final, dir string
	clean      *strings.Replacer
}

// openEvidence returns the evidence of a commit, which is collected in the directory dir and published below out, and
// the directories of killed gates that it removed there. It fails if out is not writable, or if links of the repository
// lead a relative one out of the working directory.
func openEvidence(out, commit, dir string, clean *strings.Replacer) (e *evidence, removed []string, err error) {
	e = &evidence{final: filepath.Join(out, commit), dir: dir, clean: clean}
	if filepath.IsLocal(out) {
		here, err := os.OpenRoot(".")
		if err != nil {
			return nil, nil, err
		}
		defer here.Close()
		if err := here.MkdirAll(out, 0o755); err != nil {
			return nil, nil, fmt.Errorf("%w; to follow links, write an absolute path", err)
		}
	} else if err := os.MkdirAll(out, 0o755); err != nil {
		return nil, nil, err
	}
	probe, held, removed, err := localworker.NewDir(out)
	if err != nil {
		return nil, nil, err
	}
	return e, removed, errors.Join(os.RemoveAll(probe), held.Close())
}

// write writes a file without any secret.
func (e *evidence) write(name string, text []byte) error {
	file := filepath.Join(e.dir, filepath.FromSlash(name))
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, []byte(e.clean.Replace(string(text))), 0o644)
}

// writeJSON writes a file with a JSON value.
func (e *evidence) writeJSON(name string, v any) error {
	text, err := encode(v)
	if err != nil {
		return err
	}
	return e.write(name, text)
}

// encode returns indented JSON that people can read: without escapes for HTML.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	err := enc.Encode(v)
	return b.Bytes(), err
}

// publish replaces the evidence of an earlier gate. Gates on one commit may publish at once: the evidence is then that
// of one of them.
func (e *evidence) publish() error {
	partial, held, _, err := localworker.NewDir(filepath.Dir(e.final))
	if err != nil {
		return err
	}
	defer held.Close()
	const tries = 100
	if err = errors.Join(os.Chmod(partial, 0o755), os.CopyFS(partial, os.DirFS(e.dir))); err == nil {
		for range tries { // again if another gate has published meanwhile
			if err = os.RemoveAll(e.final); err == nil {
				err = os.Rename(partial, e.final)
			}
			if !errors.Is(err, fs.ErrExist) {
				break
			}
		}
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(partial))
	}
	// It may be gone, with the evidence, since another gate has published.
	if err := os.Remove(filepath.Join(e.final, localworker.LockFile)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
