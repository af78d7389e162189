// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/syncbuf"
	"google.golang.org/grpc/peer"
)

// Rule 19: the first upload without a digest function decides what such requests mean, until another client contradicts.
func TestFunctionsAreLearned(t *testing.T) {
	var flag flags.DigestFunctions
	must.Succeed(t, flag.Set("set=blake3"))
	var log syncbuf.Buffer
	table := newFunctionTable(&flag, slog.New(slog.NewTextHandler(&log, nil)))
	instances := table.instances(castest.Instances())
	meant := func(instance string, sample cas.Function) cas.Function {
		t.Helper()
		in := must.Get(instances(instance))(t)
		return must.Get(in.FunctionOf(repb.DigestFunction_UNKNOWN, sample.Sum(nil).Proto()))(t)
	}
	for _, step := range []struct {
		instance  string
		f         cas.Function
		ok        bool
		then      cas.Function
		lines     int
		lastInLog string
	}{
		{"a", cas.BLAKE3, true, cas.BLAKE3, 1, "instance=a function=blake3 default=sha256"},
		{"a", cas.BLAKE3, true, cas.BLAKE3, 1, ""},
		{"a", cas.SHA256TREE, false, cas.BLAKE3, 1, ""},
		{"a", cas.GITSHA1, true, cas.GITSHA1, 2, "function=gitsha1"},
		{"a", cas.SHA256, true, cas.SHA256, 3, "use several"},
		{"a", cas.BLAKE3, false, cas.SHA256, 3, ""},
		{"b", cas.SHA256, true, cas.SHA256, 3, ""},
		{"b", cas.BLAKE3, false, cas.SHA256, 3, ""},
		{"set", cas.BLAKE3, true, cas.BLAKE3, 3, ""},
		{"set", cas.SHA256, false, cas.BLAKE3, 3, ""},
		{"set", cas.GITSHA1, true, cas.GITSHA1, 4, ""},
	} {
		err := table.report(t.Context(), step.instance, step.f)
		expect.Equal(t, err == nil, step.ok, "%+v: accepted, %v", step, err)
		if err != nil && (!errors.Is(err, cas.ErrInvalid) || !strings.Contains(err.Error(), fmt.Sprintf("--digest-function %s=%v", step.instance, step.f))) {
			t.Errorf("%+v: got error %q, want ErrInvalid with the flag", step, err)
		}
		expect.Equal(t, meant(step.instance, step.f), step.then, "%+v: function of later requests", step)
		lines := strings.Split(strings.TrimSpace(log.String()), "\n")
		expect.Equal(t, len(lines), step.lines, "%+v: lines in the log", step)
		expect.Text(t, lines[len(lines)-1], step.lastInLog, "log")
	}
	expect.Equal(t, meant("c", cas.BLAKE3), cas.SHA256, "function in an instance without uploads")

	// The advertised functions, which Bazel up to 6 compares with its own, stay as they are.
	must.Succeed(t, table.report(t.Context(), "d", cas.BLAKE3))
	expect.Equal(t, must.Get(instances("d"))(t).Serves()[0], cas.SHA256, "first function served")
}

func TestLearnedFunctionsAreLimited(t *testing.T) {
	table := newFunctionTable(&flags.DigestFunctions{}, slog.New(slog.DiscardHandler))
	from := func(i int) context.Context {
		return peer.NewContext(t.Context(), &peer.Peer{Addr: &net.IPAddr{IP: net.IPv4(10, 0, 0, byte(i/maxLearnedByCaller))}})
	}
	for i := range maxLearned {
		must.Succeed(t, table.report(from(i), fmt.Sprint(i), cas.BLAKE3))
	}
	expect.Error(t, table.report(t.Context(), "another", cas.BLAKE3), cas.ErrInvalid, "one more instance")
	expect.Error(t, table.report(t.Context(), "another", cas.SHA256), nil, "one more instance with the default")
	expect.Error(t, table.report(t.Context(), "0", cas.GITSHA1), nil, "a known instance")
	expect.Equal(t, len(table.learned), maxLearned, "instances")
}
