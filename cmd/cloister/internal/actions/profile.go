// SPDX-License-Identifier: Apache-2.0

package actions

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas/durable"
	"github.com/cloister-build/cloister/cmd/cloister/internal/buildevents"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
)

// maxProfiled limits the answers of a build that a profile considers.
const maxProfiled = 200_000

// A Profile is a build as a trace: Bazel's own profile, if it published one, and the actions that the server executed.
type Profile struct {
	ID string

	from    *client.Server
	file    *buildevents.File // nil if there is none
	started time.Time
	entries []*cloisterpb.HistoryEntry
	more    bool // there are more entries
}

// ReadProfile returns the profile of a build. The name is an invocation id, or one that the server's history resolves.
func ReadProfile(ctx context.Context, from *client.Server, name string) (*Profile, error) {
	id, err := from.Invocation(ctx, name)
	if errors.Is(err, client.ErrNoHistory) {
		id, err = name, nil
	}
	if err != nil {
		return nil, err
	}
	p := &Profile{ID: id, from: from}
	b, err := ReadBuild(ctx, from, id)
	known := err == nil
	if known {
		p.file, p.started = b.Profile, b.Started
	} else if e, ok := errors.AsType[*exit.Error](err); !ok || e.Code != exit.Absent && e.Code != exit.No {
		return nil, err
	}
	filter := client.Filter{Invocation: id}
	req := filter.Request(maxProfiled)
	req.AllInstances = from.AllInstances()
	answers := 0
	err = from.History(ctx, req, func(e *cloisterpb.HistoryEntry) error {
		if answers++; e.How == "executed" {
			p.entries = append(p.entries, e)
		}
		return nil
	})
	if p.more = answers == maxProfiled; err != nil && !(known && errors.Is(err, client.ErrNoHistory)) {
		return nil, err
	}
	if !known && answers == 0 {
		return nil, exit.New(exit.Absent, fmt.Errorf("the history has no build %s", render.Quote(id)))
	}
	return p, nil
}

// Write writes the profile as JSON in the Trace Event Format. If it lacks Bazel's own profile, the problem says why.
func (p *Profile) Write(ctx context.Context, out io.Writer) (problem, err error) {
	about := map[string]any{"invocation": p.ID, "executed": len(p.entries), "incomplete": p.more}
	in, problem := p.open(ctx)
	if problem != nil {
		about["problem"] = problem.Error()
		_, err = writeTrace(out, nil, p.started, p.entries, about)
		return problem, err
	}
	defer in.Close()
	return writeTrace(out, in, p.started, p.entries, about)
}

// open opens Bazel's profile.
func (p *Profile) open(ctx context.Context) (io.ReadCloser, error) {
	if p.file == nil {
		return nil, errors.New("the build published no profile; pass --bes_backend and a remote cache to Bazel")
	}
	at := *p.from
	if u, err := url.Parse(at.Address); err == nil { // the file names its instance in full
		u.Path, u.RawPath = "", ""
		at.Address = u.String()
	}
	at.Instance = p.file.Instance
	store, err := at.Open(ctx)
	if err != nil {
		return nil, err
	}
	in, err := store.Open(ctx, p.file.Digest, 0)
	if err != nil {
		store.Close()
		return nil, fmt.Errorf("Bazel's profile: %w", err)
	}
	return &closers{in, store}, nil
}

// closers is a blob whose Close also closes its store.
type closers struct {
	io.ReadCloser
	store io.Closer
}

// Close implements io.Closer.
func (c *closers) Close() error { return errors.Join(c.ReadCloser.Close(), c.store.Close()) }

// SaveProfile writes the profile of a build to a file, compressed if its name ends in .gz, and the problem, if there is
// one, to notes.
func SaveProfile(ctx context.Context, from *client.Server, name, file string, notes io.Writer) error {
	p, err := ReadProfile(ctx, from, name)
	if err != nil {
		return err
	}
	var problem error
	err = durable.WriteFunc(file, 0o644, func(f *os.File) (err error) {
		if !strings.HasSuffix(file, ".gz") {
			problem, err = p.Write(ctx, f)
			return err
		}
		out := gzip.NewWriter(f)
		if problem, err = p.Write(ctx, out); err == nil {
			err = out.Close()
		}
		return err
	})
	if err == nil && problem != nil {
		_, err = fmt.Fprintf(notes, "note: %s lacks Bazel's profile or a part of it: %v\n", file, problem)
	}
	return err
}
