// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/durable"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestActionVerdicts: verdicts of this and of earlier versions are listed while a server may be writing them, the
// latest first, and text of clients cannot break the lines.
func TestActionVerdicts(t *testing.T) {
	dir := t.TempDir()
	out, code := runCLI(t, "action", "verdicts", "--dir", dir, "--json")
	expect.That(t, code == 0 && out == "[]\n", "without a file: exit %d, %q", code, out)

	log := must.Get(durable.Open(durable.Config{Path: filepath.Join(dir, "verdicts.v1.log"), Checksum: true}))(t)
	defer log.Close()
	day := 24 * time.Hour
	action := func(name string) cas.Digest { return cas.SHA256.Sum([]byte(name)) }
	for _, v := range []struct {
		name, more string
		age        time.Duration
	}{
		{"fixed", `"why":"x"`, day},
		{"old", `"why":"not reproducible: out differs (timestamp)"`, 31 * day},
		{"new", `"why":"x","target":"//a:\u001bb","mnemonic":"Make","result":"differs","causes":["timestamp","owner"]`, day + time.Hour/2},
		{"fixed", `"why":""`, 0},
	} {
		must.Succeed(t, log.Append(fmt.Appendf(nil, `{"action":"%s",%s,"time":%d}`, action(v.name), v.more, time.Now().Add(-v.age).Unix())))
	}
	out, code = runCLI(t, "action", "verdicts", "--dir", dir)
	want := "ACTION        VERDICT          AGE   EXPIRES  WHAT\n" +
		action("new").String()[:12] + "  differs         1d0h    28d23h  $'//a:\\033b'  timestamp, owner\n" +
		action("old").String()[:12] + "  -              31d0h   expired  'out differs (timestamp)'\n"
	expect.Equal(t, out, want, "exit %d", code)

	out, _ = runCLI(t, "action", "verdicts", "--dir", dir, "--json")
	var rows []verdictRow
	must.Succeed(t, json.Unmarshal([]byte(out), &rows))
	must.Be(t, len(rows) == 2, "got %s", out)
	r := &rows[0]
	expect.That(t, r.Action == action("new").String() && r.Target == "//a:\x1bb" && r.Result == "differs" && len(r.Causes) == 2 &&
		r.Expires.Equal(r.Checked.Add(30*day)), "got %+v", r)
}
