// SPDX-License-Identifier: Apache-2.0

package service

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
)

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
			if c.Worker.Fingerprint() == before {
				t.Errorf("fleet %t: the fingerprint is that of before the change", fleet)
			}
		})
	}
}
