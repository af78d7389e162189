// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/must"
)

// An action with a root file system never runs with the host's.
func TestRootIsNotIgnored(t *testing.T) {
	b := newBench(t, compiles)
	root := must.Get(cas.FromProto(cas.SHA256, b.put(&repb.Directory{})))(t)
	_, err := b.Execute(t.Context(), &Task{Action: b.action(nil), Root: root}, nil)
	wantFault(t, "an action with a root file system", err, FaultUnmet)
}
