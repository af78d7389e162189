// SPDX-License-Identifier: Apache-2.0

package persistent

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

func TestSplit(t *testing.T) {
	startup, flags := Split([]string{"@tool", "-x", "@bazel-out/flags", "--flagfile=more", "-flagfile=third", "--flagfile", "@"})
	expect.Equal(t, strings.Join(startup, " "), "@tool -x --flagfile @")
	expect.Equal(t, strings.Join(flags, " "), "@bazel-out/flags --flagfile=more -flagfile=third")
}

func TestExpand(t *testing.T) {
	files := map[string]string{"a": "one\r\n@b\n\n@@two\n@repo//:label\n--flagfile=c", "b": "three\n", "loop": "@loop\n"}
	read := func(name string) (string, error) {
		text, ok := files[name]
		if !ok {
			return "", io.ErrUnexpectedEOF
		}
		return text, nil
	}
	got := must.Get(Expand([]string{"@a", "--flagfile=d"}, read))(t)
	expect.Equal(t, strings.Join(got, "|"), "one|three||@@two|@repo//:label|--flagfile=c|--flagfile=d")
	_, err := Expand([]string{"@loop"}, read)
	expect.Error(t, err, errArguments)
	_, err = Expand([]string{"@missing"}, read)
	expect.Error(t, err, io.ErrUnexpectedEOF, "missing")
}

// TestEncode compares with messages that protoc encodes from text.
func TestEncode(t *testing.T) {
	r := &Request{Arguments: []string{"a", "bc"}, Inputs: []Input{{"p", cas.SHA256.Sum([]byte("x"))}}}
	sum := r.Inputs[0].Digest.Hash()
	expect.Equal(t, string(must.Get(protocolBuffers{}.encode(r))(t)), "\x4e\x0a\x01a\x0a\x02bc\x12\x45\x0a\x01p\x12\x40"+sum)
	expect.Equal(t, string(must.Get(lines{}.encode(r))(t)),
		`{"arguments":["a","bc"],"inputs":[{"path":"p","digest":"`+sum+`"}]}`+"\n")
}

func TestDecode(t *testing.T) {
	for _, c := range []struct {
		codec codec
		text  string
		want  Response
		err   error
		words string
	}{
		{protocolBuffers{}, "\x00", Response{}, nil, ""},
		{protocolBuffers{}, "\x06\x08\x03\x12\x02hi", Response{3, "hi"}, nil, ""},
		{protocolBuffers{}, "\x04\x18\x00\x20\x00", Response{}, nil, ""},
		{protocolBuffers{}, "\x0b\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", Response{ExitCode: -1}, nil, ""},
		{protocolBuffers{}, "\x05\x12\x01x\x78\x01", Response{Output: "x"}, nil, ""},
		{protocolBuffers{}, "", Response{}, io.EOF, ""},
		{protocolBuffers{}, "\x06\x08\x03", Response{}, io.ErrUnexpectedEOF, ""},
		{protocolBuffers{}, "Hello\n", Response{}, errGarbage, `"Hello\n"`},
		{protocolBuffers{}, "\xff\xff\xff\xff\xff\xff", Response{}, errGarbage, ""},
		{protocolBuffers{}, "\x02\x18\x07", Response{}, errGarbage, "request 7"},
		{protocolBuffers{}, "\x02\x12\x05", Response{}, errGarbage, "decoded"},
		{lines{}, `{"exitCode":3,"output":"hi","requestId":0}` + "\n", Response{3, "hi"}, nil, ""},
		{lines{}, "{}\n", Response{}, nil, ""},
		{lines{}, "Hello\n", Response{}, errGarbage, `"Hello\n"`},
		{lines{}, `{"exitCode":"x"}` + "\n", Response{}, errGarbage, "exitCode"},
		{lines{}, `{"requestId":9}` + "\n", Response{}, errGarbage, "request 9"},
		{lines{}, "{", Response{}, io.EOF, ""},
	} {
		got, err := c.codec.decode(bufio.NewReaderSize(strings.NewReader(c.text), 16))
		if c.err == nil {
			must.Be(t, err == nil, "%q: %v", c.text, err)
			expect.Equal(t, got, c.want, "%q", c.text)
		} else {
			expect.Error(t, err, c.err, c.words)
		}
	}
}

// start starts a process in this one: serve is its main function.
func start(t *testing.T, serve func(ctx context.Context, std sandbox.Stdio) *sandbox.Result) *Process {
	t.Helper()
	p := must.Get(Start(t.Context(), true, func(ctx context.Context, std sandbox.Stdio) (*sandbox.Result, error) {
		return serve(ctx, std), nil
	}))(t)
	t.Cleanup(func() { p.Close() })
	return p
}

// echo answers each request with the number of requests so far, and with two answers from the given request on.
func echo(twice int) func(context.Context, sandbox.Stdio) *sandbox.Result {
	return func(_ context.Context, std sandbox.Stdio) *sandbox.Result {
		in := bufio.NewScanner(std.Stdin)
		for n := 1; in.Scan(); n++ {
			text := `{"exitCode":` + string(rune('0'+n)) + "}\n"
			if n >= twice {
				text += text
			}
			_, _ = io.WriteString(std.Stdout, text)
		}
		return &sandbox.Result{ExitCode: 4}
	}
}

func TestProcess(t *testing.T) {
	p := start(t, echo(3))
	for n := range int32(3) {
		got := must.Get(p.Do(t.Context(), &Request{}, time.Minute))(t)
		expect.Equal(t, got.ExitCode, n+1)
	}
	// Its second answer to the last request arrives before or after the next request; it must not be taken for another.
	for p.Alive() {
		time.Sleep(time.Millisecond)
	}
	expect.Equal(t, p.Close().ExitCode, 4)
	expect.That(t, !p.Alive(), "a closed process is alive")
}

func TestProcessFailures(t *testing.T) {
	forever := func(ctx context.Context, std sandbox.Stdio) *sandbox.Result {
		_, _ = io.WriteString(std.Stderr, "waiting")
		<-ctx.Done()
		return &sandbox.Result{Stopped: true}
	}
	p := start(t, forever)
	_, err := p.Do(t.Context(), &Request{}, time.Nanosecond)
	f, ok := errors.AsType[*Failure](err)
	must.Be(t, ok && f.TimedOut && f.Result.Stopped, "got %v", err)

	// The rest of a request that was not read would stay in memory, and be taken for the beginning of the next one.
	p = start(t, func(ctx context.Context, std sandbox.Stdio) *sandbox.Result {
		_, _ = io.WriteString(std.Stdout, "{}\n")
		<-ctx.Done()
		return &sandbox.Result{Stopped: true}
	})
	_, err = p.Do(t.Context(), &Request{Arguments: []string{strings.Repeat("-", 4<<20)}}, time.Second)
	_, ok = errors.AsType[*Failure](err)
	expect.That(t, ok, "the process responded without reading the request: got %v, want a Failure", err)

	// The caller executes the action again if the sandbox failed, so this must not look like an action that failed.
	p = must.Get(Start(t.Context(), true, func(context.Context, sandbox.Stdio) (*sandbox.Result, error) {
		return nil, sandbox.ErrClosed
	}))(t)
	_, err = p.Do(t.Context(), &Request{}, time.Minute)
	_, ok = errors.AsType[*Failure](err)
	must.Be(t, !ok && errors.Is(err, sandbox.ErrClosed), "got %v, want the error of the sandbox", err)

	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(io.ErrNoProgress)
	p = start(t, forever)
	_, err = p.Do(ctx, &Request{}, time.Minute)
	expect.Error(t, err, io.ErrNoProgress)
	expect.That(t, !p.Alive(), "the process is alive after its request was cancelled")

	_, err = start(t, func(_ context.Context, std sandbox.Stdio) *sandbox.Result {
		_, _ = io.ReadFull(std.Stdin, make([]byte, 1))
		_, _ = io.WriteString(std.Stderr, strings.Repeat("-", 5*maxTail)+"why")
		return &sandbox.Result{ExitCode: 9}
	}).Do(t.Context(), &Request{}, time.Minute)
	f, ok = errors.AsType[*Failure](err)
	must.Be(t, ok && f.Reason == "it exited with code 9 before it responded" && strings.HasSuffix(f.Stderr, "-why") && len(f.Stderr) <= 2*maxTail,
		"got %v, %d bytes of stderr", err, len(f.Stderr))
}

// A thing is a Member.
type thing struct {
	dead  bool
	ended chan struct{}
}

func newThing() *thing { return &thing{ended: make(chan struct{})} }

func (m *thing) Alive() bool { return !m.dead }
func (m *thing) Close()      { close(m.ended) }

func (m *thing) closed() bool {
	select {
	case <-m.ended:
		return true
	default:
		return false
	}
}

func TestPool(t *testing.T) {
	p := &Pool[*thing]{MaxIdle: 2, MaxAge: time.Hour, Root: t.TempDir()}
	a, b, c, dead := newThing(), newThing(), newThing(), newThing()
	p.Put("k", a)
	p.Put("k", b)
	got, ok := p.Take("k")
	expect.That(t, ok && got == b, "got %p, want the most recently used", got)
	_, ok = p.Take("other")
	expect.That(t, !ok, "got a member of another key")
	p.Put("k", b)
	p.Put("other", c)
	expect.That(t, a.closed() && !b.closed() && !c.closed(), "more than MaxIdle: closed %t, %t, %t", a.closed(), b.closed(), c.closed())
	p.Put("dead", dead)
	dead.dead = true
	_, ok = p.Take("dead")
	expect.That(t, !ok && dead.closed() && b.closed(), "got a dead member")
	machine(t, p.Root, map[string]string{"proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 99 kB\n"})
	p.sweep()
	expect.That(t, c.closed(), "memory is low, but the member is kept")
	expect.Equal(t, NewPool[*thing]().Root, "/")
}

// machine writes files below root.
func machine(t *testing.T, root string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		name = filepath.Join(root, name)
		must.Succeed(t, os.MkdirAll(filepath.Dir(name), 0o755))
		must.Succeed(t, os.WriteFile(name, []byte(text), 0o644))
	}
}

// TestLowMemory: the machine is low on memory, or a control group of either version that contains the worker is.
func TestLowMemory(t *testing.T) {
	const v2, v1 = "sys/fs/cgroup/pod/", "sys/fs/cgroup/memory/pod/"
	for name, c := range map[string]struct {
		files map[string]string
		want  bool
	}{
		"no files":            {nil, false},
		"enough":              {map[string]string{"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 100 kB\n"}, false},
		"machine":             {map[string]string{"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 99 kB\n"}, true},
		"group without limit": {map[string]string{v2 + "memory.max": "max\n", v2 + "memory.current": "950\n"}, false},
		"group with enough":   {map[string]string{v2 + "memory.max": "1000\n", v2 + "memory.current": "900\n"}, false},
		"group":               {map[string]string{v2 + "memory.max": "1000\n", v2 + "memory.current": "901\n"}, true},
		"own group":           {map[string]string{v2 + "worker/memory.max": "1000\n", v2 + "worker/memory.current": "901\n"}, true},
		"group of others":     {map[string]string{v2 + "other/memory.max": "1000\n", v2 + "other/memory.current": "901\n"}, false},
		"group with cached files": {map[string]string{
			v2 + "memory.max": "1000\n", v2 + "memory.current": "990\n", v2 + "memory.stat": "anon 900\nactive_file 40\ninactive_file 50\n",
		}, false},
		"version 1": {map[string]string{v1 + "memory.limit_in_bytes": "1000\n", v1 + "memory.usage_in_bytes": "901\n"}, true},
		"version 1 without limit": {map[string]string{
			v1 + "memory.limit_in_bytes": "9223372036854771712\n", v1 + "memory.usage_in_bytes": "901\n",
		}, false},
		"version 1 with cached files": {map[string]string{
			v1 + "memory.limit_in_bytes": "1000\n", v1 + "memory.usage_in_bytes": "990\n",
			v1 + "memory.stat": "active_file 0\ntotal_active_file 40\ntotal_inactive_file 50\n",
		}, false},
	} {
		root := t.TempDir()
		machine(t, root, map[string]string{"proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/pod/worker\n3:cpuset:/x\n0::/pod/worker\n"})
		machine(t, root, c.files)
		expect.Equal(t, lowMemory(root), c.want, name)
	}
}

// TestPoolClosesOldMembers: a member that has been idle for too long is closed without any further call.
func TestPoolClosesOldMembers(t *testing.T) {
	p := &Pool[*thing]{MaxIdle: 2, MaxAge: time.Millisecond, Root: t.TempDir()}
	m := newThing()
	p.Put("k", m)
	select {
	case <-m.ended:
	case <-time.After(time.Minute):
		t.Error("it is not closed")
	}
}
