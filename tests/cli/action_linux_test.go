// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
)

// orPanic is for errors that only a broken machine causes.
func orPanic[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// A guest is a connection of a client.
type guest struct {
	*grpc.ClientConn
	ctx context.Context
}

// plain connects to an address without TLS.
func plain(t testing.TB, address string) *guest {
	t.Helper()
	secure := grpc.WithTransportCredentials(insecure.NewCredentials())
	conn := must.Get(grpc.NewClient("passthrough:///"+address, secure))(t)
	t.Cleanup(func() { conn.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
	t.Cleanup(cancel)
	return &guest{conn, ctx}
}

// guest connects to the current server, with a token unless that is "".
func (s *story) guest(token string) *guest {
	g := plain(s, s.script.Getenv("ADDR"))
	if token != "" {
		g.ctx = metadata.AppendToOutgoingContext(g.ctx, "authorization", "Bearer "+token)
	}
	return g
}

// blob uploads a blob to an instance, put a message.
func (g *guest) blob(instance string, data []byte) (*repb.Digest, error) {
	d := cas.SHA256.Sum(data).Proto()
	r, err := repb.NewContentAddressableStorageClient(g).BatchUpdateBlobs(g.ctx, &repb.BatchUpdateBlobsRequest{
		InstanceName: instance, Requests: []*repb.BatchUpdateBlobsRequest_Request{{Digest: d, Data: data}},
	})
	if err == nil {
		err = status.ErrorProto(r.Responses[0].Status)
	}
	return d, err
}

func (g *guest) put(instance string, m proto.Message) (*repb.Digest, error) {
	return g.blob(instance, orPanic(proto.Marshal(m)))
}

// executed is the result of an execution.
type executed struct {
	response *repb.ExecuteResponse
	err      error
}

// execute executes an action and sends its operation's name, which may be nil, before it returns the response.
func (g *guest) execute(req *repb.ExecuteRequest, name chan<- string) executed {
	s, err := repb.NewExecutionClient(g).Execute(g.ctx, req)
	for err == nil {
		op, e := s.Recv()
		if e != nil {
			err = e
			break
		}
		select {
		case name <- op.Name:
		default:
		}
		if op.Done {
			var r repb.ExecuteResponse
			return executed{&r, op.GetResponse().UnmarshalTo(&r)}
		}
	}
	return executed{nil, err}
}

// download reads an output repeatedly, for longer than a server takes to stop, as a build does that has many outputs.
func (g *guest) download(instance string, outputs []*repb.OutputFile) error {
	if len(outputs) == 0 {
		return errors.New("no output to download")
	}
	for range 40 {
		r, err := repb.NewContentAddressableStorageClient(g).BatchReadBlobs(g.ctx, &repb.BatchReadBlobsRequest{
			InstanceName: instance, Digests: []*repb.Digest{outputs[0].Digest},
		})
		if err != nil {
			return err
		}
		if err := status.ErrorProto(r.Responses[0].Status); err != nil {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
	return nil
}

// A flight is an action in flight.
type flight struct {
	mark   string // in its command line
	cancel func() // cancels the call
	ended  chan executed
}

// properties collects the flag -property.
type properties []*repb.Platform_Property

func (p *properties) String() string { return fmt.Sprint(*p) }

func (p *properties) Set(text string) error {
	name, value, _ := strings.Cut(text, "=")
	*p = append(*p, &repb.Platform_Property{Name: name, Value: value})
	return nil
}

// An order is an action to execute, with the flags of execute and begin.
type order struct {
	guest             *guest
	name, script      string
	input, token      string
	timeout           time.Duration
	noCache, noLookup bool
	download          bool
	properties        properties
	metadata          repb.RequestMetadata
}

func (s *story) order(args []string) (*order, error) {
	var o order
	f := flag.NewFlagSet("execute", flag.ContinueOnError)
	f.StringVar(&o.input, "input", "an input\n", "the contents of its input")
	f.StringVar(&o.token, "token", "", "the token of the caller")
	f.DurationVar(&o.timeout, "timeout", 0, "the timeout of the action")
	f.BoolVar(&o.noCache, "no-cache", false, "set do_not_cache")
	f.BoolVar(&o.noLookup, "no-lookup", false, "set skip_cache_lookup")
	f.BoolVar(&o.download, "download", false, "download the output repeatedly once there is a result")
	f.Var(&o.properties, "property", "platform property NAME=VALUE")
	f.StringVar(&o.metadata.ToolInvocationId, "invocation", "", "in the request metadata")
	f.StringVar(&o.metadata.TargetId, "target", "", "likewise")
	f.StringVar(&o.metadata.ActionMnemonic, "mnemonic", "", "likewise")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	o.name, o.script = f.Arg(0), f.Arg(1)
	o.guest = s.guest(o.token)
	who := string(orPanic(proto.Marshal(&o.metadata)))
	o.guest.ctx = metadata.AppendToOutgoingContext(o.guest.ctx, "build.bazel.remote.execution.v2.requestmetadata-bin", who)
	return &o, nil
}

// upload uploads an action and sets the story's variable for it.
func (s *story) upload(o *order) (*repb.ExecuteRequest, error) {
	instance := s.script.Getenv("INSTANCE")
	input, err := o.guest.blob(instance, []byte(o.input))
	if err != nil {
		return nil, err
	}
	a := &repb.Action{Platform: &repb.Platform{Properties: o.properties}, DoNotCache: o.noCache}
	if o.timeout > 0 {
		a.Timeout = durationpb.New(o.timeout)
	}
	a.CommandDigest, err = o.guest.put(instance, &repb.Command{
		Arguments: []string{"/bin/sh", "-c", o.script}, OutputPaths: []string{"out"},
	})
	if err != nil {
		return nil, err
	}
	root := &repb.Directory{Files: []*repb.FileNode{{Name: "input", Digest: input}}}
	if a.InputRootDigest, err = o.guest.put(instance, root); err != nil {
		return nil, err
	}
	d, err := o.guest.put(instance, a)
	s.script.Setenv(o.name, named(d))
	return &repb.ExecuteRequest{InstanceName: instance, ActionDigest: d, SkipCacheLookup: o.noLookup}, err
}

// named returns a digest as HASH/SIZE.
func named(d *repb.Digest) string { return fmt.Sprintf("%s/%d", d.GetHash(), d.GetSizeBytes()) }

func (s *story) execute(args []string) error {
	o, err := s.order(args)
	if err != nil {
		return err
	}
	request, err := s.upload(o)
	if err != nil {
		return err
	}
	return s.show(o.name, o.guest.execute(request, nil))
}

// show prints the result of an action.
func (s *story) show(name string, e executed) error {
	if e.err != nil {
		s.text = fmt.Sprintf("%s: %v\n", status.Code(e.err), e.err)
		return nil
	}
	st, r := status.FromProto(e.response.Status), e.response.Result
	if st.Code() != codes.OK {
		s.text = fmt.Sprintf("%s: %s\n", st.Code(), st.Message())
	}
	if r != nil {
		s.text += fmt.Sprintf("exit %d\nworker %s\n", r.ExitCode, r.GetExecutionMetadata().GetWorker())
		var x cloisterpb.Execution
		if aux := r.GetExecutionMetadata().GetAuxiliaryMetadata(); len(aux) > 0 && aux[0].UnmarshalTo(&x) == nil {
			s.text += fmt.Sprintf("manifest %s\nstable hash %s\n", x.Manifest, x.StableHash)
		}
	}
	if e.response.CachedResult {
		s.text += "cached\n"
	}
	s.text += e.response.Message
	if len(r.GetOutputFiles()) > 0 {
		s.script.Setenv(name+"_out", named(r.OutputFiles[0].Digest))
	}
	return nil
}

// holding is a script that runs until it gets SIGUSR1.
const holding = `trap 'go=1' USR1; while [ -z "$go" ]; do sleep 0.05; done; echo let go`

func (s *story) begin(args []string) error {
	o, err := s.order(args)
	if err != nil {
		return err
	}
	if o.script == "" {
		o.script = holding
	}
	f := &flight{mark: fmt.Sprintf("%s of %s;", o.name, s.work), ended: make(chan executed, 1)}
	o.guest.ctx, f.cancel = context.WithCancel(o.guest.ctx)
	s.Cleanup(f.cancel)
	o.script += " # " + f.mark
	request, err := s.upload(o)
	if err != nil {
		return err
	}
	s.flights[o.name] = f
	name := make(chan string, 1)
	go func() {
		e := o.guest.execute(request, name)
		if o.download && e.err == nil {
			e.err = o.guest.download(request.InstanceName, e.response.GetResult().GetOutputFiles())
		}
		f.ended <- e
	}()
	select {
	case op := <-name:
		s.script.Setenv(o.name+"_op", op)
		return nil
	case e := <-f.ended:
		f.ended <- e
		return fmt.Errorf("it ended at once: %v, %w", e.response, e.err)
	}
}

func (s *story) running(args []string) error {
	mark := s.flights[args[0]].mark
	return await(mark+" runs", func() bool { return len(sandboxtest.Running(s, mark)) > 0 })
}

func (s *story) release(args []string) error {
	mark := s.flights[args[0]].mark
	err := await(mark+" runs", func() bool { return sandboxtest.Signal(s, mark, syscall.SIGUSR1) > 0 })
	if err != nil {
		return err
	}
	return s.finish(args)
}

func (s *story) finish(args []string) error {
	select {
	case e := <-s.flights[args[0]].ended:
		return s.show(args[0], e)
	case <-time.After(patience):
		return fmt.Errorf("%s did not end within %v", args[0], patience)
	}
}

func (s *story) abandon(args []string) error {
	s.flights[args[0]].cancel()
	return s.finish(args)
}

func (s *story) gone(args []string) error {
	if left := sandboxtest.Running(s, s.flights[args[0]].mark); len(left) > 0 {
		return fmt.Errorf("got processes %v, want none", left)
	}
	return nil
}
