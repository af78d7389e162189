// SPDX-License-Identifier: Apache-2.0

//go:build unix

package console_test

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// gateText is a report with hostile texts.
const gateText = `{"format": "cloister-gate-report v1", "revision": "<img src=x>\u001b[31m", "policy": {"file": "<script>alert(1)", "sha256": "aa"},
 "mode": "enforce", "verdict": "violation", "exit_code": 4, "message": "<svg/onload=x>", "sandbox": {"tier": "full", "observed": true, "not_enforced": ["<img>"]},
 "steps": [{"id": "<img id>", "command": ["make", "<img src=x>\u202e"], "inputs": "<img>", "verdict": "violation", "exit_code": 1, "message": "<img>",
  "violations": [{"kind": "connect", "subject": "tcp 192.0.2.1:443", "process": "<img>", "count": 2, "text": "<img src=x>\u001b[0m"}],
  "exceptions": [{"host": "<img>", "port": 443, "owner": "<img>", "reason": "<img>", "expires": "<img>", "connections": 3}], "denied": ["<img>"]}]}`

// addReport adds a report to the directory.
func (f *fixture) addReport(commit, text string) {
	f.t.Helper()
	must.Succeed(f.t, os.MkdirAll(filepath.Join(f.reports, commit), 0o755))
	must.Succeed(f.t, os.WriteFile(filepath.Join(f.reports, commit, "report.json"), []byte(text), 0o644))
}

func TestGatePages(t *testing.T) {
	f := open(t, "")
	expect.Text(t, f.page("/gate"), "no reports")
	commit := strings.Repeat("ab", 20)
	f.addReport(commit, gateText)
	f.addReport(strings.Repeat("cd", 20), `{"format": "cloister-gate-report v1", "verdict": "clean", "exit_code": 0, "mode": "strict", "steps": []}`)
	long := time.Now().Add(-time.Hour)
	must.Succeed(t, os.Chtimes(filepath.Join(f.reports, commit, "report.json"), long, long))
	list := f.page("/gate")
	expect.Texts(t, list, []string{`class="bad">violation<td>enforce<td class="num">1<td class="num">1`, "<td>clean<td>strict", `aria-current="page"`})
	expect.That(t, strings.Index(list, "cdcdcdcd") < strings.Index(list, "abababab"), "the newest report is not the first: %s", list)
	report := f.page("/gate/" + commit)
	expect.Texts(t, report, []string{"&lt;img id&gt;", "exit code 1", "connect", "443", "full; network system calls are recorded"})
	checkHarmless(t, report, "report")
	expect.Text(t, f.page("/gate.json"), `"verdict": "clean"`)
	data := f.page("/gate/" + commit + ".json")
	expect.Text(t, data, `"exit_code": 4`)
	expect.That(t, json.Valid([]byte(data)) && !strings.Contains(data, "<img"), "the report as JSON: %s", data)
}

// TestGatePagesDistrustTheDirectory: an invalid report is shown as an error, and no file outside the directory is read.
func TestGatePagesDistrustTheDirectory(t *testing.T) {
	f := open(t, "")
	outside := filepath.Join(t.TempDir(), "report.json")
	must.Succeed(t, os.WriteFile(outside, []byte(gateText), 0o644))
	dir := func(name string) string {
		path := filepath.Join(f.reports, name)
		must.Succeed(t, os.Mkdir(path, 0o755))
		return filepath.Join(path, "report.json")
	}
	name := func(digit string) string { return strings.Repeat(digit, 40) }
	must.Succeed(t, os.Symlink(outside, dir(name("1"))))
	must.Succeed(t, syscall.Mkfifo(dir(name("2")), 0o644))
	must.Succeed(t, os.Symlink(filepath.Dir(outside), filepath.Join(f.reports, name("3"))))
	f.addReport("beside", gateText)
	f.addReport(name("4"), "not JSON <img>")
	f.addReport(name("5"), `{"format": "other"}`)
	f.addReport(name("6"), gateText+strings.Repeat(" ", 3<<20))
	list := f.page("/gate")
	expect.Texts(t, list, []string{"damaged", "format", "larger than"})
	checkHarmless(t, list, "list")
	for _, hidden := range []string{name("1"), name("2"), name("3"), "beside", f.reports, "enforce"} {
		expect.That(t, !strings.Contains(list, hidden), "the list has %s", hidden)
	}
	for path, want := range map[string]int{
		name("1"): http.StatusInternalServerError, name("2"): http.StatusInternalServerError,
		name("3"): http.StatusInternalServerError, name("4"): http.StatusInternalServerError,
		name("7"): http.StatusNotFound, "beside": http.StatusNotFound, "..%2Freports%2Fbeside": http.StatusNotFound,
	} {
		code, body := f.get("/gate/" + path)
		expect.Equal(t, code, want, path)
		expect.That(t, !strings.Contains(body, "enforce") && !strings.Contains(body, f.reports), "%s: %s", path, body)
	}
}

// TestGatePagesNeedRights: the reports are for those who may see the audit log.
func TestGatePagesNeedRights(t *testing.T) {
	f := open(t, "[read]")
	f.addReport(strings.Repeat("ab", 20), gateText)
	for token, want := range map[string]int{"": http.StatusUnauthorized, token: http.StatusForbidden} {
		f.token = token
		for _, path := range []string{"/gate", "/gate/" + strings.Repeat("ab", 20)} {
			code, body := f.get(path)
			expect.That(t, code == want && !strings.Contains(body, "enforce"), "%s: got %d, want %d", path, code, want)
		}
	}
	f = open(t, "[operate]")
	f.token = token
	f.addReport(strings.Repeat("ab", 20), gateText)
	expect.Text(t, f.page("/gate"), "enforce")
}
