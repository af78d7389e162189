// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/ca"
	"github.com/cloister-build/cloister/tests/internal/loopback"
	"github.com/cloister-build/cloister/tests/must"
)

// TestMonitoringUsesMetricsThatExist checks the metrics of the dashboard and the alert rules against those of a server
// that has everything they watch: a certificate, rights, an upstream, samples, and an executed action.
func TestMonitoringUsesMetricsThatExist(t *testing.T) {
	t.Parallel()
	upstream := serve(t)
	metrics := must.Get(loopback.Address())(t)
	_, guest := upstream.secured(ca.New(t, t.TempDir()), []string{
		"--cas", "grpc://" + upstream.server.Addr, "--metrics", metrics, "--repro-sample", "1%",
	}, "  - {name: anyone, anonymous: true, rights: [read, write, execute]}")
	guest("", "").succeed(job{script: "true"})
	resp, err := http.Get("http://" + metrics + "/metrics")
	must.Succeed(t, err)
	defer resp.Body.Close()
	exists := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^[a-z_]+`).FindAllString(string(must.Get(io.ReadAll(resp.Body))(t)), -1) {
		exists[m] = true
	}
	const files = "../../cmd/packaging/monitoring/"
	for _, file := range []string{"dashboard.json", "alerts.yaml"} {
		text := must.Get(os.ReadFile(files + file))(t)
		expect.That(t, filepath.Ext(file) != ".json" || json.Valid(text), "%s is not valid JSON", file)
		used := regexp.MustCompile(`\b(?:cloister|grpc_server|process)_[a-z_]+\b`).FindAllString(string(text), -1)
		must.Be(t, len(used) >= 9, "%s uses %d metrics, want at least 9", file, len(used))
		for _, m := range used {
			expect.That(t, exists[m], "%s uses %s, which the server does not have", file, m)
		}
	}
}
