// SPDX-License-Identifier: Apache-2.0

package blobview

import (
	"fmt"
	"maps"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"google.golang.org/grpc/codes"
)

// fields collects the fields of a message.
type fields struct {
	function cas.Function
	all      []Field
	bytes    int // of the values
}

// add adds a field, unless its value is empty. Once the values together are long, each is abbreviated.
func (f *fields) add(name, value string) {
	if f.bytes += len(value); f.bytes > MaxShown && len(value) > 100 {
		value = value[:100] + "..."
	}
	if value != "" {
		f.all = append(f.all, Field{Name: name, Value: Visible(value)})
	}
}

// blob adds a field that names a blob of a kind.
func (f *fields) blob(name string, d *repb.Digest, kind string) {
	if d == nil {
		return
	}
	digest, err := cas.FromProto(f.function, d)
	if err != nil {
		f.add(name, err.Error())
		return
	}
	f.all = append(f.all, Field{Name: name, Value: digest.String(), Blob: digest, Kind: kind})
}

func (f *fields) action(m *repb.Action) {
	f.blob("command", m.CommandDigest, Command)
	f.blob("input root", m.InputRootDigest, Directory)
	if m.Timeout != nil {
		f.add("timeout", m.Timeout.AsDuration().String())
	}
	if m.DoNotCache {
		f.add("do_not_cache", "true")
	}
	f.add("salt", string(m.Salt))
	f.platform(m.Platform)
}

func (f *fields) platform(p *repb.Platform) {
	for _, q := range p.GetProperties() {
		f.add("platform", render.Quote(q.Name)+"="+render.Quote(q.Value))
	}
}

func (f *fields) command(m *repb.Command) {
	f.add("command", render.QuoteAll(m.Arguments))
	f.add("directory", m.WorkingDirectory)
	for _, v := range m.EnvironmentVariables {
		f.add("environment", render.Quote(v.Name)+"="+render.Quote(v.Value))
	}
	for _, o := range slices.Concat(m.OutputPaths, m.OutputFiles, m.OutputDirectories) {
		f.add("declares", render.Quote(o))
	}
	f.platform(m.Platform)
}

func (f *fields) result(m *repb.ActionResult) {
	f.add("exit code", fmt.Sprint(m.GetExitCode()))
	for _, o := range m.GetOutputFiles() {
		f.blob("output "+Visible(o.Path), o.Digest, "")
	}
	for _, o := range m.GetOutputDirectories() {
		f.blob("output "+Visible(o.Path)+"/", o.TreeDigest, Tree)
		f.blob("output "+Visible(o.Path)+"/", o.RootDirectoryDigest, Directory)
	}
	for _, l := range slices.Concat(m.GetOutputSymlinks(), m.GetOutputFileSymlinks(), m.GetOutputDirectorySymlinks()) {
		f.add("output "+Visible(l.Path), "link to "+l.Target)
	}
	f.blob("stdout", m.GetStdoutDigest(), Text)
	f.blob("stderr", m.GetStderrDigest(), Text)
	f.add("stdout", string(m.GetStdoutRaw()))
	f.add("stderr", string(m.GetStderrRaw()))
	f.add("worker", m.GetExecutionMetadata().GetWorker())
}

func (f *fields) response(m *repb.ExecuteResponse) {
	if c := codes.Code(m.GetStatus().GetCode()); c != codes.OK {
		f.add("status", c.String()+": "+m.GetStatus().GetMessage())
	}
	f.add("message", m.GetMessage())
	if m.GetResult() != nil {
		f.result(m.Result)
	}
	for _, name := range slices.Sorted(maps.Keys(m.GetServerLogs())) {
		f.blob("server log "+Visible(name), m.ServerLogs[name].GetDigest(), Text)
	}
}
