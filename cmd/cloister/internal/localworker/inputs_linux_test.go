// SPDX-License-Identifier: Apache-2.0

package localworker

import (
	"fmt"
	"os"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
)

// TestInputsAreMounted: a repeated run does not copy its inputs again.
func TestInputsAreMounted(t *testing.T) {
	if os.Geteuid() != 0 {
		sandboxtest.Unavailable(t, "root", "an ordinary user cannot mount an EROFS image")
	}
	w := must.Get(Open(&confinement.Flags{Tier: "full"}))(t)
	t.Cleanup(func() { must.Succeed(t, w.Close()) })
	if err := w.Start(t.Context(), worker.Config{Name: "test"}); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	store := must.Get(w.Store.Instance(""))(t).Store
	root := &repb.Directory{}
	for i := range 20 {
		blob, digest := castest.Blob(byte(i), 10)
		must.Succeed(t, store.Put(t.Context(), digest, strings.NewReader(string(blob))))
		root.Files = append(root.Files, &repb.FileNode{Name: fmt.Sprintf("f%02d", i), Digest: digest.Proto()})
	}
	command := must.Get(cas.PutProto(t.Context(), store, cas.SHA256, &repb.Command{Arguments: []string{"/bin/cat", "f00"}}))(t)
	input := must.Get(cas.PutProto(t.Context(), store, cas.SHA256, root))(t)
	action := must.Get(cas.PutProto(t.Context(), store, cas.SHA256,
		&repb.Action{CommandDigest: command.Proto(), InputRootDigest: input.Proto()}))(t)
	out := must.Get(w.Local.Execute(t.Context(), &worker.Task{Action: action}, nil))(t)
	var m cloisterpb.Execution
	must.Succeed(t, out.Result.ExecutionMetadata.AuxiliaryMetadata[0].UnmarshalTo(&m))
	expect.Equal(t, m.Sandbox.Inputs, "image", "inputs (%s)", m.Sandbox.InputsReason)
}
