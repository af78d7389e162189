// SPDX-License-Identifier: Apache-2.0

package buildevents

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	bepb "github.com/cloister-build/cloister/proto/bazel/buildeventstream"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	bespb "google.golang.org/genproto/googleapis/devtools/build/v1"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
)

const hash = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

// fold returns the summary of events in text format.
func fold(t *testing.T, events ...string) *Build {
	t.Helper()
	b := NewBuild(Header{ID: id(1), Instance: "main"})
	for i, text := range events {
		var e bepb.BuildEvent
		must.Succeed(t, prototext.Unmarshal([]byte(text), &e))
		m := bazel(1, i+1, &e).OrderedBuildEvent.Event
		must.Succeed(t, b.Add(must.Get(proto.Marshal(m))(t)))
	}
	return b.Finish()
}

func TestSummary(t *testing.T) {
	log := func(name string) string {
		return `{name: "` + name + `" uri: "bytestream://127.0.0.1:8980/main/blobs/` + hash + `/7"}`
	}
	b := fold(t,
		`started {command: "test" start_time_millis: 1700000000000 build_tool_version: "4.2.3"} children {pattern {pattern: "//a/..."}}`,
		`workspace_status {item {key: "BUILD_USER" value: "me"} item {key: "BUILD_HOST" value: "here"}}`,
		`structured_command_line {command_line_label: "original" sections {chunk_list {chunk: "bazel"}}
			sections {option_list {option {combined_form: "--jobs=4"}}}}`,
		`options_parsed {explicit_cmd_line: "--jobs=4"}`,
		`id {target_configured {label: "//a:lib"}} configured {target_kind: "cc_library rule"}`,
		`id {target_configured {label: "//a:t"}} configured {target_kind: "cc_test rule"}`,
		`id {named_set {id: "0"}} named_set_of_files {files `+log("liba.a")+` file_sets {id: "1"}}`,
		`id {named_set {id: "1"}} named_set_of_files {files `+log("b")+` file_sets {id: "0"}}`,
		`id {target_completed {label: "//a:lib"}} completed {success: true output_group {file_sets {id: "0"}}}`,
		`id {target_completed {label: "//a:t"}} completed {success: true}`,
		`id {target_completed {label: "//a:bad"}} completed {failure_detail {message: "no"}}`,
		`id {target_completed {label: "//a:skipped"}} aborted {reason: SKIPPED}`,
		`id {action_completed {label: "//a:bad" primary_output: "bad.o"}} action {exit_code: 2 type: "CppCompile" stderr `+log("stderr")+`}`,
		`id {action_completed {label: "//a:lib"}} action {success: true type: "CppCompile"}`,
		`id {test_result {label: "//a:t" run: 1 shard: 1 attempt: 1}} test_result {status: FAILED test_action_output `+log("test.log")+`}`,
		`id {test_result {label: "//a:t" run: 1 shard: 1 attempt: 2}} test_result {status: PASSED cached_locally: true
			test_action_output `+log("test.log")+` test_action_output `+log("test.lcov")+`}`,
		`id {test_summary {label: "//a:t"}} test_summary {overall_status: FLAKY run_count: 1 total_run_duration_millis: 1500}`,
		`id {unconfigured_label {label: "//b:absent"}} aborted {reason: LOADING_FAILURE description: "no such package"}`,
		`progress {stderr: "\x1b[32mINFO: \x1b[0mone\r\ntwo\x07"}`,
		`build_metrics {action_summary {actions_executed: 3 runner_count {name: "total" count: 3} runner_count {name: "remote" count: 2}}
			timing_metrics {wall_time_in_ms: 2000}}`,
		`finished {exit_code {name: "BUILD_FAILURE" code: 1} finish_time {seconds: 1700000002}}`,
		`build_tool_logs {log `+log("command.profile.gz")+` log {name: "critical path" contents: "1s\n2s"}}`,
	)
	text := string(must.Get(json.MarshalIndent(b, "", " "))(t))
	expect.Texts(t, text, []string{
		`"status": "failed"`, `"exit": "BUILD_FAILURE"`, `"command": "test"`, `"//a/..."`, `"started": "2023-11-14T22:13:20Z"`,
		`"target_count": 4`, `"not_built": 2`, `"test_count": 1`, `"tests_failed": 0`, `"tests_flaky": 1`,
		`"user": "me"`, `"host": "here"`, `"--jobs=4"`, `"rule": "cc_library rule"`, `"outcome": "skipped"`,
		`"mnemonic": "CppCompile"`, `"digest": "` + hash + `/7"`, `"stderr": "INFO: one\ntwo\\a"`, `"reason": "loading failure"`,
		`"wall_ns": 2000000000`, `"remote": 2`, `"contents": "1s\\n2s"`,
	})
	test := b.Targets[1].Test
	expect.That(t, test.Status == "flaky" && test.Attempts == 2 && len(test.Results) == 2, "test is %+v", test)
	expect.That(t, b.Profile != nil && len(b.Logs) == 1 && len(b.Coverage) == 1 && len(b.FailedActions) == 1 &&
		len(b.Targets[0].Outputs) == 2, "got %s", text)
	expect.Equal(t, b.Count(), "4 targets, 1 tests, 2 not built, 1 flaky")
}

// TestProfileIsRecognized by the names that versions of Bazel give it.
func TestProfileIsRecognized(t *testing.T) {
	for name, want := range map[string]bool{
		"command.profile.gz": true, "command.profile": true, "command-5f1d6c0e-3b0a-4f7c-9d1e-2a3b4c5d6e7f.profile.gz": true,
		"command.log": false, "my-command.profile.gz": false, "command.profile.gz.txt": false,
	} {
		expect.Equal(t, profileName.MatchString(name), want, name)
	}
}

// TestOnlyBlobsAreFiles keeps digests of blobs and no other place.
func TestOnlyBlobsAreFiles(t *testing.T) {
	for uri, want := range map[string]string{
		"bytestream://host:1/blobs/" + hash + "/7":                  " " + hash + "/7",
		"bytestream://host/a/b/blobs/" + hash + "/7":                "a/b " + hash + "/7",
		"bytestream://host/blobs/blake3/" + hash + "/7":             " blake3:" + hash + "/7",
		"bytestream://host/blobs/" + hash + "/x":                    " ",
		"bytestream://host/a//b/blobs/" + hash + "/7":               " ",
		"bytestream://host/uploads/" + hash + "/7":                  " ",
		"file:///etc/passwd":                                        " ",
		"http://host/blobs/" + hash + "/7":                          " ",
		"javascript:alert(1)":                                       " ",
		"bytestream://host/compressed-blobs/zstd/" + hash + "/7":    " ",
		"bytestream://%zz":                                          " ",
		"bytestream://host/blobs/" + strings.Repeat("f", 63) + "/7": " ",
	} {
		f := file(&bepb.File{Name: "x", File: &bepb.File_Uri{Uri: uri}})
		digest := ""
		if !f.Digest.IsZero() {
			digest = f.Digest.String()
		}
		expect.Equal(t, f.Instance+" "+digest, want, "%s", uri)
	}
}

// FuzzAdd reads hostile events: texts of a summary are printable and bounded.
func FuzzAdd(f *testing.F) {
	f.Add([]byte("\n\x00"), "a\x1b[2J\nb")
	f.Fuzz(func(t *testing.T, event []byte, label string) {
		b := NewBuild(Header{ID: id(1)})
		m := &bespb.BuildEvent{}
		if proto.Unmarshal(event, m) == nil && m.GetBazelEvent() != nil {
			must.Succeed(t, b.Add(event))
		}
		e := &bepb.BuildEvent{}
		if proto.Unmarshal(event, e) == nil {
			must.Succeed(t, b.Add(must.Get(proto.Marshal(bazel(1, 1, e).OrderedBuildEvent.Event))(t)))
		}
		b.target(label, label)
		for _, target := range b.Finish().Targets {
			for _, s := range []string{target.Label, target.Rule, target.Message} {
				expect.That(t, len(s) <= maxText && !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' }), "text %q", s)
			}
		}
		must.Get(json.Marshal(b))(t)
	})
}

// A summary is not much larger than the events: what exceeds a limit is left out.
func TestPartsAreBounded(t *testing.T) {
	b := NewBuild(Header{})
	set := &bepb.NamedSetOfFiles{}
	for range maxList {
		set.Files = append(set.Files, &bepb.File{})
	}
	for i := range 2 * maxParts / maxList {
		b.namedSet(fmt.Sprint(i), set)
	}
	b.target("//a:late", "")
	result := &bepb.TestResult{TestActionOutput: set.Files}
	b.testResult(&bepb.BuildEventId_TestResultId{Label: "//a:late"}, result)
	files := 0
	for _, s := range b.sets {
		files += len(s.files)
	}
	for _, t := range b.Targets {
		for _, r := range t.Test.Results {
			files += len(r.Files)
		}
	}
	expect.That(t, files > maxParts/2 && files <= maxParts, "%d files", files)
}
