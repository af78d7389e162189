// SPDX-License-Identifier: Apache-2.0

package comparison

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/worker/repro/changes"
	"github.com/cloister-build/cloister/worker/repro/compare"
)

// maxSteps limits the entries of a history that are read for one build.
const maxSteps = 1_000_000

// A buildsReport is what diff prints of two builds.
type buildsReport struct {
	Kind string `json:"kind"`
	A    string `json:"a"`
	B    string `json:"b"`
	// Callers have entries of a build, if several have; an invocation id is the client's claim.
	CallersA []string `json:"callers_a,omitempty"`
	CallersB []string `json:"callers_b,omitempty"`

	Same  bool           `json:"same"`
	Count map[string]int `json:"count"` // of actions, by relation
	// Pairs are the differing pairs, causes before their consequences.
	Pairs []shownPair `json:"pairs,omitempty"`
}

// A shownPair is an action of each build.
type shownPair struct {
	Relation string        `json:"relation"`
	Target   string        `json:"target,omitempty"`
	Mnemonic string        `json:"mnemonic,omitempty"`
	A        string        `json:"action_a,omitempty"`
	B        string        `json:"action_b,omitempty"`
	Follows  []string      `json:"follows,omitempty"` // actions of A
	Changes  []shownChange `json:"changes,omitempty"`
	Note     string        `json:"note,omitempty"`
}

// builds compares two builds in the history of the server.
func (c *Config) builds(ctx context.Context, a, b string) (r *buildsReport, err error) {
	var steps [2][]changes.Step
	var callers [2][]string
	ids := [2]string{a, b}
	for i := range ids {
		if ids[i], err = c.From.Invocation(ctx, ids[i]); err != nil {
			return nil, err
		}
	}
	a, b = ids[0], ids[1]
	for i, id := range ids {
		if steps[i], callers[i], err = c.steps(ctx, id); err != nil {
			return nil, err
		}
		if len(steps[i]) == 0 {
			return nil, fmt.Errorf("the history of %s, instance %q, has no build %s; list builds with cloister invocation ls", c.From.Address, c.From.Instance, render.Quote(id))
		}
	}
	reader, err := c.reader(ctx)
	if err != nil {
		return nil, err
	}
	pairs, err := changes.Builds(ctx, reader, c.store, steps[0], steps[1])
	if err != nil {
		return nil, err
	}
	r = &buildsReport{Kind: "build", A: a, B: b, CallersA: callers[0], CallersB: callers[1], Same: true, Count: map[string]int{}}
	explained := 0
	for _, p := range pairs {
		s := shown(p)
		r.Count[s.Relation]++
		if p.Relation == changes.Same {
			continue
		}
		r.Same = false
		if p.Relation == changes.Nondeterministic && explained < maxExplained {
			explained++
			s.Changes, err = c.explained(ctx, p.Changes, compare.Known{})
		} else {
			names := *c
			names.Names = true // for changed actions, names explain enough
			s.Changes, err = names.explained(ctx, p.Changes, compare.Known{})
		}
		if err != nil {
			return nil, err
		}
		r.Pairs = append(r.Pairs, s)
	}
	return r, nil
}

func (r *buildsReport) equal() bool { return r.Same }

// steps returns the actions of a build, oldest first, each with its latest result, and its callers if it has several.
func (c *Config) steps(ctx context.Context, id string) (all []changes.Step, callers []string, err error) {
	place := map[string]int{}
	err = c.From.History(ctx, &cloisterpb.ListHistoryRequest{InvocationId: id, Limit: maxSteps}, func(e *cloisterpb.HistoryEntry) error {
		if e.How == "checked" {
			return nil // not an answer to the build
		}
		if i, found := slices.BinarySearch(callers, e.Caller); !found {
			callers = slices.Insert(callers, i, e.Caller)
		}
		if i, ok := place[e.Action]; ok {
			if s := &all[i]; s.Result == "" { // looked up last, and executed before
				s.Result = e.Result
				s.Manifest, _ = cas.ParseDigest(e.Manifest) // zero if there is none
			}
			return nil
		}
		one, err := c.From.ActionOf(e)
		if err != nil {
			return err
		}
		s := changes.Step{Action: one.Digest, Target: e.TargetId, Mnemonic: e.ActionMnemonic, Result: e.Result}
		s.Manifest, _ = cas.ParseDigest(e.Manifest) // zero if there is none
		place[e.Action] = len(all)
		all = append(all, s)
		return nil
	})
	slices.Reverse(all)
	if len(callers) < 2 {
		callers = nil
	}
	return all, callers, err
}

// shown returns p for printing, without its changes.
func shown(p *changes.Pair) shownPair {
	s := shownPair{Relation: string(p.Relation)}
	if p.B != nil {
		s.Target, s.Mnemonic, s.B = p.B.Target, p.B.Mnemonic, p.B.Action.String()
	}
	if p.A != nil {
		s.Target, s.Mnemonic, s.A = p.A.Target, p.A.Mnemonic, p.A.Action.String()
	}
	for _, f := range p.Follows {
		s.Follows = append(s.Follows, f.A.Action.String())
	}
	if s.Follows != nil {
		s.Relation = "follows"
	}
	if p.Err != nil {
		s.Note = "unknown cause: " + p.Err.Error()
	}
	return s
}

// relations are in the order in which they are printed.
var relations = []string{string(changes.Same), string(changes.Nondeterministic), string(changes.OtherToolchain), string(changes.Changed), "follows", string(changes.OnlyA), string(changes.OnlyB)}

// briefly lists the relations for which only the first few steps are printed.
var briefly = []string{"follows", string(changes.OnlyA), string(changes.OnlyB)}

// print prints r for a person, with everything that clients chose quoted.
func (r *buildsReport) print(out io.Writer) error {
	var b bytes.Buffer
	client.NoteCallers(&b, r.A, r.CallersA)
	client.NoteCallers(&b, r.B, r.CallersB)
	if r.Same {
		_, err := out.Write(b.Bytes())
		return err
	}
	var counts []string
	for _, relation := range relations {
		if n := r.Count[relation]; n > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", n, relation))
		}
	}
	fmt.Fprintf(&b, "build\n  - %s\n  + %s\nactions: %s\n", render.Quote(r.A), render.Quote(r.B), strings.Join(counts, ", "))
	const most = 50 // that follow from others, or are missing
	left := map[string]int{}
	for _, p := range r.Pairs {
		brief := slices.Contains(briefly, p.Relation)
		if left[p.Relation]++; brief && left[p.Relation] > most {
			continue
		}
		fmt.Fprintf(&b, "\n%s: %s\n", p.Relation, p.title())
		if p.A == p.B {
			fmt.Fprintf(&b, "  %s\n", p.A)
		} else {
			sides(&b, "", p.A, p.B)
		}
		for _, f := range p.Follows {
			fmt.Fprintf(&b, "  from %s\n", f)
		}
		if p.Relation != "follows" {
			printChanges(&b, "    ", p.Changes)
		}
		if p.Note != "" {
			fmt.Fprintf(&b, "    %s\n", p.Note)
		}
	}
	for _, relation := range briefly {
		if n := left[relation] - most; n > 0 {
			fmt.Fprintf(&b, "\n%s: %d more\n", relation, n)
		}
	}
	_, err := out.Write(b.Bytes())
	return err
}

// title describes an action.
func (p *shownPair) title() string {
	return cmp.Or(render.QuoteAll(strings.Fields(p.Mnemonic+" "+p.Target)), "an action without target and mnemonic")
}
