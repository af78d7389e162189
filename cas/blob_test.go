// SPDX-License-Identifier: Apache-2.0

package cas_test

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// within returns b as field n of a message.
func within(n protowire.Number, b []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(nil, n, protowire.BytesType), b)
}

// TestReadProtoLimitsAmplification: a decoded blob of empty entries would take fifty times its size in memory.
func TestReadProtoLimitsAmplification(t *testing.T) {
	empty := func(n protowire.Number) []byte { return bytes.Repeat(within(n, nil), 2<<20) }
	for _, c := range []struct {
		name string
		m    proto.Message
		b    []byte
	}{
		{"Directory/files", &repb.Directory{}, empty(1)},
		{"Directory/node_properties/properties", &repb.Directory{}, within(5, empty(1))},
		{"Directory/files/node_properties/properties", &repb.Directory{}, within(1, within(6, empty(1)))},
		{"Tree/children", &repb.Tree{}, empty(2)},
		{"Tree, symlinks of the root", &repb.Tree{}, within(1, empty(3))},
		{"Tree/children/files", &repb.Tree{}, within(2, empty(1))},
		{"Command/arguments", &repb.Command{}, empty(1)},
		{"Command/environment_variables", &repb.Command{}, empty(2)},
		{"Action/platform/properties", &repb.Action{}, within(10, empty(1))},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := castest.NewMemory()
			d := must.Get(cas.PutBytes(t.Context(), s, cas.SHA256, c.b))(t)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			err := cas.ReadProto(t.Context(), s, d, c.m)
			runtime.ReadMemStats(&after)
			limit := fmt.Sprint(4 * cas.MaxMessage)
			if strings.HasPrefix(c.name, "Tree") {
				limit = fmt.Sprint(4 * cas.MaxTree)
			}
			if !errors.Is(err, cas.ErrInvalid) || !strings.Contains(err.Error(), d.String()) ||
				!strings.Contains(err.Error(), limit) {
				t.Errorf("got %v, want ErrInvalid naming %s and the limit %s", err, d, limit)
			}
			if got := after.TotalAlloc - before.TotalAlloc; got > 2*uint64(len(c.b)) {
				t.Errorf("allocated %d bytes to reject %d", got, len(c.b))
			}
		})
	}
}

// TestReadProtoReadsLargestDirectoryAndTree: a blob of the maximum size is accepted if its names have ordinary lengths.
func TestReadProtoReadsLargestDirectoryAndTree(t *testing.T) {
	fill := func(limit int) *repb.Directory {
		m := &repb.Directory{}
		for size := 0; ; {
			name := fmt.Sprintf("%016d.o", len(m.Files))
			n := &repb.FileNode{Name: name, Digest: cas.SHA256.Sum(nil).Proto(), IsExecutable: true}
			if size += proto.Size(n) + 2; size > limit-64 {
				return m
			}
			m.Files = append(m.Files, n)
		}
	}
	for _, c := range []struct{ put, get proto.Message }{
		{fill(cas.MaxMessage), &repb.Directory{}},
		{&repb.Tree{Root: fill(cas.MaxTree)}, &repb.Tree{}},
	} {
		s := castest.NewMemory()
		d := must.Get(cas.PutProto(t.Context(), s, cas.SHA256, c.put))(t)
		must.Succeed(t, cas.ReadProto(t.Context(), s, d, c.get))
	}
}

func TestReadProtoLimitsSizeByKind(t *testing.T) {
	s := castest.NewMemory()
	d := must.Get(cas.PutBytes(t.Context(), s, cas.SHA256, within(1, make([]byte, cas.MaxMessage))))(t)
	for _, m := range []proto.Message{&repb.Action{}, &repb.Command{}, &repb.Directory{}} {
		err := cas.ReadProto(t.Context(), s, d, m)
		expect.That(t, errors.Is(err, cas.ErrInvalid) && strings.Contains(err.Error(), fmt.Sprint(cas.MaxMessage)),
			"%T: got %v, want ErrInvalid naming the limit", m, err)
	}
	err := cas.CheckMessage(make([]byte, cas.MaxMessage+1), &repb.Tree{})
	expect.Error(t, err, nil, "Tree larger than the limit of a Directory")
	err = cas.CheckMessage(make([]byte, cas.MaxTree+1), &repb.Tree{})
	expect.That(t, errors.Is(err, cas.ErrInvalid) && strings.Contains(err.Error(), fmt.Sprint(cas.MaxTree)),
		"Tree larger than its limit: got %v, want ErrInvalid naming the limit", err)
}

// FuzzCheckMessage: no small blob is rejected, even if it is malformed.
func FuzzCheckMessage(f *testing.F) {
	f.Add(within(1, within(2, nil)))
	f.Add([]byte{0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f})
	f.Add([]byte{0x0b, 0x0b, 0x0c, 0x0c})
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, m := range []proto.Message{&repb.Action{}, &repb.Command{}, &repb.Directory{}, &repb.Tree{}} {
			if err := cas.CheckMessage(b, m); err != nil && len(b) < 1<<18 {
				t.Errorf("%T of %d bytes: %v", m, len(b), err)
			}
		}
	})
}
