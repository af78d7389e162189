// SPDX-License-Identifier: Apache-2.0

package service

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/internal/results"
	"google.golang.org/protobuf/types/known/anypb"
)

// TestResultsOfOthersKeepTheirToolchain: a server corrects its own results, but not those of other servers that use it
// as a cache.
func TestResultsOfOthersKeepTheirToolchain(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		instances := castest.Instances()
		c := Config{Worker: worker.Config{
			Name: "w", Backend: struct{ sandbox.Backend }{}, Instances: instances, Stager: &tree.Stager{},
			Features:  sandbox.Features{Audits: []sandbox.Audit{sandbox.AuditOff}},
			Toolchain: []sandbox.Input{{Target: "/usr", Source: dir}}, Certificates: []sandbox.Input{},
		}}
		m := must.Get(newMachine(t.Context(), &c))(t)
		defer m.Close()
		for _, row := range []struct {
			what string
			to   cas.Instances
			want string
		}{
			{"of another server", m.cfg.Worker.Instances, "another"},
			{"of its own", m.confirmer.Watch(m.cfg.Worker.Instances), results.ChangedToolchain},
		} {
			action := cas.SHA256.Sum([]byte(row.what))
			aux := must.Get(anypb.New(&cloisterpb.Execution{Toolchain: "another"}))(t)
			must.Succeed(t, must.Get(row.to(""))(t).Actions.Record(t.Context(), action, &repb.ActionResult{
				ExecutionMetadata: &repb.ExecutedActionMetadata{AuxiliaryMetadata: []*anypb.Any{aux}},
			}))
			time.Sleep(time.Minute)
			synctest.Wait()
			r := must.Get(must.Get(instances(""))(t).Actions.Lookup(t.Context(), action))(t)
			expect.Equal(t, results.Recorded(r).GetToolchain(), row.want, "toolchain of a result %s", row.what)
		}
	})
}

// TestIdleWorkerNoticesToolchain: the first action after an idle period has the current fingerprint, in a fleet too,
// although nothing asked for it meanwhile.
func TestIdleWorkerNoticesToolchain(t *testing.T) {
	for _, fleet := range []bool{false, true} {
		dir := t.TempDir()
		synctest.Test(t, func(t *testing.T) {
			m := &machine{}
			c := Config{Worker: worker.Config{
				Fleet: fleet, Backend: struct{ sandbox.Backend }{}, Instances: castest.Instances(), Stager: &tree.Stager{},
				Features:  sandbox.Features{Audits: []sandbox.Audit{sandbox.AuditOff}},
				Toolchain: []sandbox.Input{{Target: "/usr", Source: dir}}, Certificates: []sandbox.Input{},
			}}
			must.Succeed(t, m.confine(t.Context(), &c, c.Worker.Instances))
			defer m.Close()
			before := c.Worker.Fingerprint()
			time.Sleep(10 * time.Second)
			must.Succeed(t, os.WriteFile(filepath.Join(dir, "cc"), nil, 0o755))
			must.Succeed(t, os.Chtimes(dir, time.Time{}, time.Unix(1, 0))) // the clock of the file system may be coarse
			expect.That(t, c.Worker.Fingerprint() != before, "fleet %t: the fingerprint predates the change", fleet)
		})
	}
}
