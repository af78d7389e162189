// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

func timeoutBounds(c *client) {
	with := func(d *durationpb.Duration) job {
		return job{steps: []string{"say ran"}, change: func(a *repb.Action) { a.Timeout = d }}
	}
	c.refused("a timeout of -1 s", with(durationpb.New(-time.Second)), []string{"timeout"}, codes.InvalidArgument)
	// Other servers may permit that much.
	c.refused("a timeout of 10,000 h", with(durationpb.New(10_000*time.Hour)), []string{"timeout"}, codes.InvalidArgument, codes.OK)
	for what, d := range map[string]*durationpb.Duration{"no timeout": nil, "a timeout of zero": {}, "a timeout of a minute": durationpb.New(time.Minute)} {
		if stdout, _ := c.succeed(with(d)); stdout != "ran\n" {
			c.Errorf("%s: got stdout %q", what, stdout)
		}
	}
}

func outputForms(c *client) {
	c.refused("unknown output_node_properties", job{command: &repb.Command{OutputNodeProperties: []string{"no-such-property"}}},
		[]string{"no-such-property"}, codes.InvalidArgument)
	for what, format := range map[string]repb.Command_OutputDirectoryFormat{"no format": 0, "an unknown format": 99} {
		a := c.try(job{steps: []string{"mkdir d", "write d/f 1"}, outputs: []string{"d"}, command: &repb.Command{OutputDirectoryFormat: format}})
		_, r := c.wantSuccess(what, a)
		if len(r.OutputDirectories) != 1 || r.OutputDirectories[0].GetTreeDigest() == nil || c.ours && r.OutputDirectories[0].GetRootDirectoryDigest() != nil {
			c.Errorf("%s: got %v, want a Tree alone", what, r.OutputDirectories)
		}
	}
	for _, property := range c.caps.GetExecutionCapabilities().GetSupportedNodeProperties() {
		_, r := c.succeed(job{
			steps:   []string{"write f 1", "chmod 640 f"},
			outputs: []string{"f"}, command: &repb.Command{OutputNodeProperties: []string{property}},
		})
		if len(r.OutputFiles) != 1 {
			c.Errorf("output_node_properties %s: got %v, want a file", property, r)
			continue
		}
		switch p := r.OutputFiles[0].GetNodeProperties(); property {
		case "mtime":
			if age := time.Since(p.GetMtime().AsTime()); p.GetMtime() == nil || age < -time.Hour || age > time.Hour {
				c.Errorf("output_node_properties mtime: got %v, want the time of the run", p)
			}
		case "unix_mode":
			if got := p.GetUnixMode(); got == nil || got.Value&0o777 != 0o640 {
				c.Errorf("output_node_properties unix_mode: got %v, want 0640", p)
			}
		}
	}
}

// refusedProperty returns a platform property that no worker has.
func (c *client) refusedProperty() *repb.Platform_Property {
	if c.ours {
		return &repb.Platform_Property{Name: "cloister-memory", Value: "1000TiB"}
	}
	return &repb.Platform_Property{Name: "conformance-no-such-property", Value: fmt.Sprintf("%x", fresh(4))}
}

func platformPrecedence(c *client) {
	good, bad := c.platform(), c.platform(c.refusedProperty())
	if good == nil {
		good = &repb.Platform{}
	}
	with := func(command, action *repb.Platform) *answer {
		return c.try(job{steps: []string{"say ran"}, command: &repb.Command{Platform: command}, change: func(a *repb.Action) { a.Platform = action }})
	}
	if with(bad, nil).err == nil {
		if c.ours {
			c.Error("executed an action whose command requires an unavailable platform")
		}
		c.Skip("a platform property that it rejects")
	}
	if a := with(good, bad); a.err == nil {
		c.Error("the platform of the command took precedence over the unavailable platform of the action")
	}
	if a := with(bad, good); a.err != nil {
		c.Errorf("the unavailable platform of the command took precedence over that of the action: %v", a.err)
	}
}

func unknownProperty(c *client) {
	p := &repb.Platform_Property{Name: "conformance-unknown", Value: fmt.Sprintf("%x", fresh(4))}
	a := c.try(job{steps: []string{"say ran"}, change: func(a *repb.Action) { a.Platform = c.platform(p) }})
	if !c.wantCode("Execute of an action with an unknown platform property", a.err, codes.OK, codes.InvalidArgument, codes.FailedPrecondition) {
		return
	}
	if a.err == nil {
		c.wantSuccess("an unknown platform property", a)
	} else if text := status.Convert(a.err).Message(); !strings.Contains(text, p.Name) || !strings.Contains(text, p.Value) {
		c.Errorf("rejection of property %s=%s: got %v, want an error that names it", p.Name, p.Value, a.err)
	}
	if c.ours {
		// A misspelt property of ours must not be ignored: the limit would not be enforced.
		c.refused("cloister-memroy", job{change: func(a *repb.Action) {
			a.Platform = &repb.Platform{Properties: []*repb.Platform_Property{{Name: "cloister-memroy", Value: "1GiB"}}}
		}}, []string{"cloister-memroy"}, codes.FailedPrecondition, codes.InvalidArgument)
	}
}

func unmatchedPlatform(c *client) {
	p := c.refusedProperty()
	d := c.prepare(job{steps: []string{"say ran"}, change: func(a *repb.Action) { a.Platform = c.platform(p) }})
	ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
	defer cancel()
	a := answered(c.open(ctx, d, nil))
	if a.err == nil && !c.ours {
		c.Skip("a platform property that it rejects")
	}
	c.wantText("Execute for an unavailable platform", a.err, []string{p.Name, p.Value}, codes.FailedPrecondition)
	if s := status.Convert(a.err); len(s.Details()) > 0 {
		c.Errorf("got details %v, want none: clients conclude from details that blobs are missing", s.Details())
	}
}

func fullQueue(c *client) {
	d := c.prepare(job{steps: []string{"say ran"}})
	for _, f := range []repb.DigestFunction_Value{repb.DigestFunction_SHA1, repb.DigestFunction_SHA512, repb.DigestFunction_MD5} {
		err := c.request(d, func(r *repb.ExecuteRequest) { r.DigestFunction = f }).err
		c.wantCode(fmt.Sprintf("Execute of a digest of SHA256 as %v", f), err, codes.InvalidArgument)
	}
	if !c.ours {
		c.Log("not checked: a full queue, which requires its own server")
		return
	}
	const most = 100
	for what, flag := range map[string][]string{
		"a full queue":         {"--max-queued", strconv.Itoa(most)},
		"a caller's own limit": {"--caller-limit", fmt.Sprintf("executions=%d", most)},
	} {
		c.fillQueue(what, most, flag)
	}
}

// fillQueue checks that a server with these flags accepts most requests at once, and refuses the next.
func (c *client) fillQueue(what string, most int, flag []string) {
	small := c.own(bazelrun.ServerConfig{Jobs: 1, Args: flag})
	d := small.prepare(job{steps: []string{"sleep 10m"}})
	ctx, cancel := context.WithTimeout(c.Context(), executeTime)
	defer cancel()
	execute := func() error { // requests of the same action count separately
		s, err := small.open(ctx, d, nil)
		if err == nil {
			_, err = s.Recv()
		}
		return err
	}
	for n := range most {
		if err := execute(); err != nil {
			c.Fatalf("%s: request %d of at most %d: %v", what, n+1, most, err)
		}
	}
	err := execute()
	s := status.Convert(err)
	if len(s.Details()) != 1 || s.Code() != codes.ResourceExhausted {
		c.Errorf("%s: got %v with details %v, want RESOURCE_EXHAUSTED with RetryInfo", what, err, s.Details())
	} else if info, ok := s.Details()[0].(*errdetails.RetryInfo); !ok || info.GetRetryDelay().AsDuration() <= 0 {
		c.Errorf("%s: got %v, want RetryInfo with a delay", what, s.Details())
	}
	*small.ended = true
	small.server.Kill() // stopping would wait for the sleeping action
}

func instanceAndPriority(c *client) {
	d := c.prepare(job{steps: []string{"say ran"}})
	elsewhere := func(r *repb.ExecuteRequest) { r.InstanceName = fmt.Sprintf("elsewhere-%x", fresh(4)) }
	err := c.request(d, elsewhere).err
	c.wantCode("Execute in an instance without the blobs", err, codes.FailedPrecondition, codes.NotFound, codes.InvalidArgument, codes.PermissionDenied)
	if status.Code(err) == codes.FailedPrecondition {
		c.lists("Execute in an instance without the action", err, d)
	}
	for _, priority := range []int32{-100, 100} {
		c.wantSuccess(fmt.Sprintf("priority %d", priority), c.request(c.prepare(job{steps: []string{"say ran"}}), func(r *repb.ExecuteRequest) {
			r.ExecutionPolicy = &repb.ExecutionPolicy{Priority: priority}
			r.ResultsCachePolicy = &repb.ResultsCachePolicy{Priority: priority}
		}))
	}
	if !c.ours {
		c.Log("not checked: the order of queued actions, which requires its own server")
		return
	}
	small := c.own(bazelrun.ServerConfig{Jobs: 1})
	got := small.order([]contender{{"third", 0}, {"last", 7}, {"first", -7}, {"second", -1}, {"fourth", 0}})
	if want := []string{"first", "second", "third", "fourth", "last"}; !slices.Equal(got, want) {
		c.Errorf("got order %q, want %q", got, want)
	}
}

// A contender is an action that competes for the only slot.
type contender struct {
	name     string
	priority int32
}

// order executes actions in this order on one slot and returns their names in the order of execution. Equal names are
// the same action.
func (c *client) order(all []contender) []string {
	c.Helper()
	ctx, cancel := context.WithTimeout(c.Context(), executeTime)
	defer cancel()
	// If the blocking action ends before all are queued, for example on a busy machine, repeat with a longer one.
	for block := 2 * time.Second; block < time.Minute; block *= 3 {
		blocker := must.Get(c.open(ctx, c.prepare(job{steps: []string{"sleep " + block.String()}}), nil))(c)
		awaitStage(blocker, repb.ExecutionStage_EXECUTING)
		type ending struct {
			name string
			*answer
		}
		ends := make(chan ending, len(all))
		digests := map[string]*repb.Digest{}
		for _, w := range all {
			if digests[w.name] == nil {
				digests[w.name] = c.prepare(job{steps: []string{"say " + w.name}})
			}
			s := must.Get(c.open(ctx, digests[w.name], func(r *repb.ExecuteRequest) {
				r.ExecutionPolicy = &repb.ExecutionPolicy{Priority: w.priority}
			}))(c)
			awaitStage(s, repb.ExecutionStage_QUEUED)
			go func() { ends <- ending{w.name, answered(s, nil)} }()
		}
		allWaited := time.Now()
		begun := map[string]time.Time{}
		var names []string
		for range all {
			e := <-ends
			r := c.wantResult(e.name, e.answer)
			if begun[e.name].IsZero() {
				names = append(names, e.name)
			}
			begun[e.name] = r.Result.GetExecutionMetadata().GetExecutionStartTimestamp().AsTime()
		}
		slices.SortFunc(names, func(a, b string) int { return begun[a].Compare(begun[b]) })
		if begun[names[0]].After(allWaited) {
			return names
		}
	}
	c.Fatal("the machine is too slow to queue the actions")
	return nil
}

// awaitStage reads a stream until it reaches at least the stage, or ends.
func awaitStage(s stream, stage repb.ExecutionStage_Value) bool {
	for {
		op, err := s.Recv()
		if err != nil {
			return false
		}
		var m repb.ExecuteOperationMetadata
		if err := op.GetMetadata().UnmarshalTo(&m); err != nil {
			return false
		}
		if m.GetStage() >= stage {
			return m.GetStage() == stage
		}
	}
}
