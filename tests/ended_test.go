// SPDX-License-Identifier: Apache-2.0

package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestRepeatedTestsExcuseNoCrash: after a crash gotestsum repeats one test, and would pass without those that never
// ran.
func TestRepeatedTestsExcuseNoCrash(t *testing.T) {
	if _, err := exec.LookPath("awk"); err != nil {
		sandboxtest.Unavailable(t, "tools", err)
	}
	const again = "start run:A pass:A pass"
	for _, c := range []struct {
		name, events string
		accepted     bool
	}{
		{"passed", "start run:A pass:A run:B skip:B pass", true},
		{"flaky test", "start run:A run:A/s fail:A/s fail:A run:B pass:B fail " + again, true},
		{"fatal error in a test", "start run:A fail " + again, false},
		{"fatal error after a failed test", "start run:B fail:B run:A fail " + again, false},
		{"TestMain", "start run:A pass:A fail start pass", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			var text strings.Builder
			for event := range strings.FieldsSeq(c.events) {
				action, test, _ := strings.Cut(event, ":")
				text.WriteString(`{"Time":"x","Action":"` + action + `","Package":"p"`)
				if test != "" {
					text.WriteString(`,"Test":"` + test + `"`)
				}
				text.WriteString("}\n" + `{"Action":"output","Package":"p","Output":"\"Action\":\"fail\"\n"}` + "\n")
			}
			file := filepath.Join(t.TempDir(), "events.json")
			must.Succeed(t, os.WriteFile(file, []byte(text.String()), 0o600))
			out, err := exec.CommandContext(t.Context(), filepath.Join("..", ".ci", "ended"), file).CombinedOutput()
			expect.That(t, (err == nil) == c.accepted, "got %v: %s", err, out)
		})
	}
}
