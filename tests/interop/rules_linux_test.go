// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/interop/peers"
	"github.com/cloister-build/cloister/tests/must"
)

// ruleLine is a line of the report of tests/reapi.
var ruleLine = regexp.MustCompile(`(?m)^ *(\d+)  (pass|fail|not supported) +(\S+) +(.*)$`)

// TestCheckerRatesPeers checks that the checker of tests/reapi, which Cloister passes, finds the known deviations of
// another server and skips what it does not offer. It prints the report.
func TestCheckerRatesPeers(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		kind peers.Kind
		// Known rules of this version, enough to notice a change of the checker.
		pass, fail, absent []string
	}{
		{
			peers.BazelRemote,
			[]string{"1", "8", "9", "10", "18", "30", "36", "40", "41", "46", "50", "65", "68"},
			[]string{"2", "3", "16", "25", "34", "48", "49", "62", "69"},
			[]string{"4", "20", "56", "57", "61"},
		},
	} {
		t.Run(row.kind.Name, func(t *testing.T) {
			peer := startAs(t, row.kind, false)
			outcomes := rulesOf(t, peer.Addr)
			peer.Kill() // it would wait for streams
			for outcome, rules := range map[string][]string{"pass": row.pass, "fail": row.fail, "not supported": row.absent} {
				for _, rule := range rules {
					expect.Equal(t, outcomes[rule], outcome, "rule %s", rule)
				}
			}
		})
	}
}

// rulesOf runs the rules for stores and action caches, and returns the outcome of each rule.
func rulesOf(t *testing.T, addr string) map[string]string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	report := filepath.Join(t.TempDir(), "report")
	// All rules of stores except those that take minutes where each blob is a file on its own: 100,000 directories (35),
	// and a blob of 5 GiB (55).
	cmd := exec.CommandContext(ctx, "go", "test", "-vet=off", "-count=1", "-timeout=7m", "./tests/reapi",
		"-endpoint", addr, "-rules", "1-34,36-54,56-69", "-report", report)
	cmd.Dir = filepath.Join("..", "..")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run() // fails because some rules fail
	text, readErr := os.ReadFile(report)
	must.Be(t, readErr == nil, "%v: %v\n%s", err, readErr, &out)
	t.Logf("\n%s", text)
	outcomes := map[string]string{}
	for _, line := range ruleLine.FindAllStringSubmatch(string(text), -1) {
		outcomes[line[1]] = line[2]
	}
	var counts []string
	for _, outcome := range []string{"pass", "fail", "not supported"} {
		n := 0
		for _, o := range outcomes {
			if o == outcome {
				n++
			}
		}
		if n == 0 {
			counts = append(counts, "none has outcome "+outcome)
		}
	}
	expect.That(t, len(counts) == 0 && len(outcomes) >= 60,
		"%d rules: %s\n%s", len(outcomes), strings.Join(counts, ", "), &out)
	return outcomes
}
