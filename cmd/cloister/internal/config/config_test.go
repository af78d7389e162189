// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/config"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/spf13/cobra"
)

// program returns a program with the commands head and worker. Each prints nothing and returns result.
func program(result error) *cobra.Command {
	root := &cobra.Command{Use: "program", SilenceErrors: true, SilenceUsage: true}
	root.PersistentFlags().BoolP("quiet", "q", false, "print less")
	for _, name := range []string{"head", "worker"} {
		c := &cobra.Command{Use: name, Args: cobra.NoArgs, RunE: func(*cobra.Command, []string) error { return result }}
		config.Register(c)
		f := c.Flags()
		f.Int("jobs", 1, "number of jobs")
		f.String("cas", "", "server")
		f.String("store", "", "bucket")
		c.MarkFlagsMutuallyExclusive("cas", "store")
		f.StringArray("property", nil, "property; repeatable")
		f.Duration("wait", time.Minute, "time limit")
		f.Bool(name+"-only", false, "flag of one command")
		f.String("instance", "main", "instance name")
		flags.AllowEmpty(f, "instance")
		root.AddCommand(c)
	}
	flags.ExplainMistakes(root)
	config.Enable(root)
	return root
}

// load loads the configuration of head and returns the values that are not defaults, each as KEY=VALUE (ORIGIN).
func load(t *testing.T, text string, args ...string) (string, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "c.yaml")
	must.Succeed(t, os.WriteFile(file, []byte(text), 0o600))
	head, _, err := program(nil).Find([]string{"head"})
	must.Succeed(t, err)
	must.Succeed(t, head.ParseFlags(append(args, "--config", file)))
	if _, err := config.Load(head); err != nil {
		return "", errors.New(strings.ReplaceAll(err.Error(), file, "c.yaml"))
	}
	var all []string
	for _, v := range config.Values(head) {
		if v.Origin != "default" && v.Key != "config" {
			all = append(all, v.Key+"="+v.Value+" ("+strings.ReplaceAll(v.Origin, file, "c.yaml")+")")
		}
	}
	return strings.Join(all, ", "), nil
}

func TestPrecedence(t *testing.T) {
	for _, c := range []struct{ name, text, env, args, want string }{
		{"file", "version: 1\njobs: 2", "", "", "jobs=2 (c.yaml:2)"},
		{"environment", "version: 1\njobs: 2", "CLOISTER_JOBS=3", "", "jobs=3 (env CLOISTER_JOBS)"},
		{"flag", "version: 1\njobs: 2", "CLOISTER_JOBS=3", "--jobs=4", "jobs=4 (flag)"},
		{"flag that restates the default", "version: 1\njobs: 2", "", "--jobs=1", "jobs=1 (flag)"},
		{"section", "version: 1\nhead: {jobs: 5}\njobs: 2", "", "", "jobs=5 (c.yaml:2)"},
		{"section of another command", "version: 1\nworker: {jobs: 5}\njobs: 2", "", "", "jobs=2 (c.yaml:3)"},
		{"key of another command", "version: 1\nworker-only: true", "", "", ""},
		{"flag of the program", "version: 1\nquiet: true", "", "", "quiet=true (c.yaml:2)"},
		{"JSON", `{"version": 1, "jobs": 2, "property": {"a": "b:c"}}`, "", "", "jobs=2 (c.yaml:1), property=[a=b:c] (c.yaml:1)"},
		{"list", "version: 1\nproperty: [a=1, b=2]", "", "", "property=[a=1,b=2] (c.yaml:2)"},
		{"mapping", "version: 1\nproperty:\n  a: 1\n  b: [2, 3]", "", "", "property=[a=1,b=2,b=3] (c.yaml:3)"},
		{"one value", "version: 1\nproperty: a=1", "", "", "property=[a=1] (c.yaml:2)"},
		{"list in the environment", "version: 1\nproperty: [c=1]", `CLOISTER_PROPERTY=a=1,"b=2,3"`, "", `property=[a=1,"b=2,3"] (env CLOISTER_PROPERTY)`},
		{"lists are not merged", "version: 1\nproperty: [c=1]", "", "--property=d=1", "property=[d=1] (flag)"},
		{"exclusive", "version: 1\ncas: x", "", "--store=y", "store=y (flag)"},
		{"exclusive in the environment", "version: 1\ncas: x", "CLOISTER_STORE=y", "", "store=y (env CLOISTER_STORE)"},
		{"duration", "version: 1\nwait: 5m", "", "", "wait=5m0s (c.yaml:2)"},
		{"empty where permitted", "version: 1\ninstance: ''", "", "", "instance= (c.yaml:2)"},
		{"password", "version: 1\ncas: grpc://user:secret@x", "", "", "cas=grpc://user:xxxxx@x (c.yaml:2)"},
		{"password in a list", "version: 1\nproperty: {a: 'grpc://user:s@cret@x'}", "", "", "property=[a=grpc://user:xxxxx@x] (c.yaml:2)"},
		{"password in a malformed address", "version: 1\ncas: grpc://user:100%@x", "", "", "cas=grpc://user:xxxxx@x (c.yaml:2)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if name, value, ok := strings.Cut(c.env, "="); ok {
				t.Setenv(name, value)
			}
			got, err := load(t, c.text, strings.Fields(c.args)...)
			expect.That(t, got == c.want && err == nil, "got %s, %v, want %s", got, err, c.want)
		})
	}
}

func TestMistakes(t *testing.T) {
	for _, c := range []struct{ text, env, want string }{
		{"version: 1\njosb: 2", "", "c.yaml: [2:1] unknown key \"josb\"\n   1 | version: 1\n>  2 | josb: 2\n       ^ did you mean \"jobs\"?"},
		{"version: 1\nhead: {josb: 2}", "", `[2:8] unknown key "josb"`},
		{"version: 1\nworker: {josb: 2}", "", `[2:10] unknown key "josb"`},
		{"version: 1\nhead: {worker-only: true}", "", `[2:8] unknown key "worker-only"`},
		{"version: 1\nnothing-of-the-sort: 2", "", `[2:1] unknown key "nothing-of-the-sort": write the name of a flag`},
		{"version: 1\nconfig: x", "", `[2:1] unknown key "config"`},
		{"version: 1\njobs: many", "", `[2:7] --jobs "many": write a whole number`},
		{"version: 1\nwait: 5", "", `[2:7] --wait "5": write 90s, 5m or 2h`},
		{"version: 1\nhead-only: yes", "", `[2:12] --head-only "yes": write true or false`},
		{"version: 1\ncas: ''", "", "[2:6] --cas is empty"},
		{"version: 1\ncas:", "", "[2:5] expected one value"},
		{"version: 1\ncas: [a, b]", "", "[2:6] expected one value"},
		{"version: 1\ncas: {a: b}", "", "[2:6] expected one value"},
		{"version: 1\nproperty: []", "", "[2:11] --property is empty"},
		{"version: 1\nproperty: [a=1, '']", "", "--property is empty"},
		{"version: 1\njobs: 1\njobs: 2", "", "[3:1] "},
		{"version: 2\njobs: 1", "", "[1:10] this version of Cloister reads version 1"},
		{"jobs: 1", "", "[1:1] missing version: write version: 1"},
		{"", "", "[1:1] the file is empty: write version: 1"},
		{"version: 1\nhead: x", "", "[2:7] expected a mapping"},
		{"version: 1\njobs: &a 1", "", "[2:7] expected one value"},
		{"version: 1", "CLOISTER_CAS=", "CLOISTER_CAS: --cas is empty"},
		{"version: 1", "CLOISTER_PROPERTY=", "CLOISTER_PROPERTY: --property is empty"},
		{"version: 1", "CLOISTER_PROPERTY=a=1\nb=2", "CLOISTER_PROPERTY: write values separated by commas, on one line"},
		{"version: 1", "CLOISTER_PROPERTY=a=\"1\",b=2", "CLOISTER_PROPERTY: write values separated by commas, on one line"},
		{"version: 1", "CLOISTER_JOBS=many", `CLOISTER_JOBS: --jobs "many": write a whole number`},
	} {
		t.Run(c.text+c.env, func(t *testing.T) {
			if name, value, ok := strings.Cut(c.env, "="); ok {
				t.Setenv(name, value)
			}
			got, err := load(t, c.text)
			expect.That(t, err != nil && strings.Contains(err.Error(), c.want), "got %s, %v, want %s", got, err, c.want)
		})
	}
}

// TestErrorsNameTheOrigin: an error about a flag says where its value comes from, and keeps its exit code.
func TestErrorsNameTheOrigin(t *testing.T) {
	t.Setenv("CLOISTER_JOBS", "7")
	root := program(exit.New(exit.Environment, errors.New("--jobs 7: too many; --wait: fine")))
	root.SetArgs([]string{"head"})
	err := root.Execute()
	coded, ok := errors.AsType[*exit.Error](err)
	expect.That(t, ok && coded.Code == exit.Environment && coded.Error() == "--jobs 7: too many; --wait: fine (--jobs: env CLOISTER_JOBS)", "got %v", err)

	t.Setenv("CLOISTER_CAS", "x")
	t.Setenv("CLOISTER_STORE", "y")
	root = program(nil)
	root.SetArgs([]string{"head"})
	err = root.Execute()
	const want = "--cas and --store are mutually exclusive: pass one of them (--cas: env CLOISTER_CAS) (--store: env CLOISTER_STORE)"
	expect.That(t, err != nil && err.Error() == want, "got %v, want %s", err, want)
}

// TestFormerFlagsAreNotDropped: the variable of earlier packages' units is an error unless its flags are passed.
func TestFormerFlagsAreNotDropped(t *testing.T) {
	t.Setenv("CLOISTER_FLAGS", "--cas x  --jobs=3")
	root := program(nil)
	root.SetArgs([]string{"head"})
	err := root.Execute()
	expect.That(t, err != nil && strings.HasPrefix(err.Error(), "CLOISTER_FLAGS has no effect: move its flags to "), "got %v", err)

	old := os.Args
	defer func() { os.Args = old }()
	os.Args = []string{"program", "head", "--cas", "x", "--jobs=3"} // as a drop-in's ExecStart= does
	root = program(nil)
	must.Succeed(t, root.Execute())
}

// TestWritableFilesAreReported: who can change a configuration can remove its auth.
func TestWritableFilesAreReported(t *testing.T) {
	old := slog.Default()
	defer slog.SetDefault(old)
	for mode, want := range map[os.FileMode]bool{0o644: false, 0o666: runtime.GOOS != "windows"} {
		var log bytes.Buffer
		slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
		file := filepath.Join(t.TempDir(), "c.yaml")
		must.Succeed(t, os.WriteFile(file, []byte("version: 1"), 0o600))
		must.Succeed(t, os.Chmod(file, mode))
		root := program(nil)
		root.SetArgs([]string{"head", "--config", file})
		must.Succeed(t, root.Execute())
		got := strings.Contains(log.String(), "everybody on this host can change the configuration")
		expect.That(t, got == want, "mode %o: got %s", mode, &log)
	}
}

// TestSchemaHasEachKey: the schema permits the flags of the commands and nothing else.
func TestSchemaHasEachKey(t *testing.T) {
	root := program(nil)
	type object struct {
		Properties           map[string]json.RawMessage
		AdditionalProperties *bool
		Required             []string
	}
	var top, head object
	must.Succeed(t, json.Unmarshal(must.Get(json.Marshal(config.Schema(root)))(t), &top))
	must.Succeed(t, json.Unmarshal(top.Properties["head"], &head))
	for _, o := range []object{top, head} {
		expect.That(t, o.AdditionalProperties != nil && !*o.AdditionalProperties, "additional properties are permitted")
	}
	for _, c := range config.Commands(root) {
		for _, v := range config.Values(c) {
			_, inTop := top.Properties[v.Key]
			_, inHead := head.Properties[v.Key]
			expect.That(t, inTop == (v.Key != "config"), "%s at the top: %t", v.Key, inTop)
			expect.That(t, inHead == (v.Key != "config" && v.Key != "worker-only"), "%s in head: %t", v.Key, inHead)
		}
	}
	expect.Equal(t, strings.Join(top.Required, " "), "version")
}
