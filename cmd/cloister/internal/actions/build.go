// SPDX-License-Identifier: Apache-2.0

package actions

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/cloister/internal/buildevents"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// ShowBuild prints a summary of the events of a build. The invocation is an id, or a name that the server's history
// resolves.
func ShowBuild(ctx context.Context, from *client.Server, name string, asJSON bool, out io.Writer) error {
	id, err := from.Invocation(ctx, name)
	if err != nil && !errors.Is(err, client.ErrNoHistory) {
		return err
	}
	b, err := ReadBuild(ctx, from, cmp.Or(id, name))
	if err != nil {
		return err
	}
	if asJSON {
		return render.JSON(out, b)
	}
	return writeBuild(out, b)
}

// ReadBuild returns the summary of the events of a build, for its invocation id.
func ReadBuild(ctx context.Context, from *client.Server, id string) (*buildevents.Build, error) {
	conn, instance, err := from.Dial()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	req := &cloisterpb.ReadBuildRequest{InstanceName: instance, InvocationId: id}
	if from.AllInstances() {
		req.InstanceName, req.AllInstances = "", true
	}
	b := buildevents.NewBuild(buildevents.Header{ID: id})
	stream, err := cloisterpb.NewBuildsClient(conn).Read(ctx, req)
	for err == nil {
		var page *cloisterpb.ReadBuildResponse
		if page, err = stream.Recv(); err != nil {
			break
		}
		b.Caller, b.Instance = cmp.Or(b.Caller, page.Caller), cmp.Or(b.Instance, page.InstanceName)
		b.Missing, b.Publishing = page.Missing, page.Publishing
		for _, e := range page.Events {
			_ = b.Add(e) // it never fails
		}
	}
	if err == io.EOF {
		return b.Finish(), nil
	}
	return nil, explainBuilds(from, err)
}

// readStates returns the states of the latest builds with events, at most limit.
func readStates(ctx context.Context, from *client.Server, limit int) ([]*cloisterpb.BuildState, error) {
	conn, instance, err := from.Dial()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	req := &cloisterpb.ListBuildsRequest{InstanceName: instance, Limit: int32(min(limit, math.MaxInt32))}
	if from.AllInstances() {
		req.InstanceName, req.AllInstances = "", true
	}
	list, err := cloisterpb.NewBuildsClient(conn).List(ctx, req)
	if err != nil {
		return nil, explainBuilds(from, err)
	}
	return list.Builds, nil
}

// explainBuilds explains an error of cloister.v1.Builds.
func explainBuilds(from *client.Server, err error) error {
	reason := remote.Reason(status.Convert(err))
	switch {
	case status.Code(err) == codes.Unavailable, status.Code(err) == codes.DeadlineExceeded:
		return from.Unreachable(reason)
	case status.Code(err) == codes.NotFound:
		return exit.New(exit.Absent, fmt.Errorf("%s; pass --bes_backend to Bazel, and --bes_instance_name for an instance", reason))
	case status.Code(err) == codes.Unimplemented:
		return exit.New(exit.No, fmt.Errorf("the server at %s stores no build events", from.Address))
	}
	return exit.New(exit.No, fmt.Errorf("build events of %s: %s", from.Address, reason))
}

// writeBuild prints a build, without targets that were built as expected.
func writeBuild(out io.Writer, b *buildevents.Build) error {
	p := render.Page{W: out}
	line := func(name, value string) {
		if value != "" {
			p.Line(name, value)
		}
	}
	line("invocation", b.ID)
	line("status", render.Red(b.Status, b.Status == buildevents.Failed && render.Colours(out))+exitName(b.Exit))
	line("command", render.QuoteAll(append([]string{b.Command}, b.Patterns...)))
	line("caller", b.Caller)
	line("user", b.User)
	line("host", b.Host)
	if !b.Started.IsZero() {
		line("started", b.Started.UTC().Format(time.RFC3339))
	}
	if !b.Finished.IsZero() {
		line("took", b.Finished.Sub(b.Started).Round(time.Millisecond).String())
	}
	line("targets", b.Count())
	for _, t := range b.Targets {
		if t.Outcome != "built" && t.Outcome != "" {
			line("not built", t.Label+"  "+t.Outcome+"  "+t.Message)
		}
	}
	for _, a := range b.FailedActions {
		line("failed", fmt.Sprintf("%s  %s  exit %d%s", a.Label, a.Mnemonic, a.ExitCode, blob(a.Stderr)))
	}
	for _, t := range b.Targets {
		if t.Test == nil {
			continue
		}
		for _, r := range t.Test.Results {
			log := ""
			if i := slices.IndexFunc(r.Files, func(f buildevents.File) bool { return f.Name == "test.log" }); i >= 0 {
				log = blob(&r.Files[i])
			}
			line("test", fmt.Sprintf("%s  %s  run %d shard %d attempt %d%s", t.Label, r.Status, r.Run, r.Shard, r.Attempt, log))
		}
	}
	for _, c := range b.Problems {
		line("problem", c.Label+"  "+c.Reason+"  "+c.Description)
	}
	if b.Profile != nil {
		line("profile", b.Profile.Digest.String())
	}
	if b.Missing > 0 {
		line("missing", render.Count(b.Missing, "event")+", because the build exceeded a limit of the server")
	}
	return p.Err
}

func exitName(name string) string {
	if name == "" {
		return ""
	}
	return " (" + name + ")"
}

func blob(f *buildevents.File) string {
	if f == nil || f.Digest.IsZero() {
		return ""
	}
	return "  " + f.Digest.String()
}
