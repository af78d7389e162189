// SPDX-License-Identifier: Apache-2.0

package shell

import (
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
)

func TestFiles(t *testing.T) {
	for _, row := range []struct {
		args []string
		want []string
	}{
		{[]string{"sh", "build.sh", "out"}, []string{"build.sh"}},
		{[]string{"/bin/bash", "-eu", "-o", "pipefail", "tools/build", "x"}, []string{"tools/build"}},
		{[]string{"sh", "-s", "x"}, nil},
		{[]string{"sh"}, nil},
		{[]string{"./build", "x"}, []string{"./build"}},
		{[]string{"gcc", "x.c"}, nil},
		{nil, nil},
		{[]string{"sh", "-c", "cd x && sh -e build.sh > out"}, []string{"build.sh"}},
		{[]string{"bash", "-c", "source a/setup.sh; A=b ./build.sh >out; bash \"c.sh\";echo ./d.sh"}, []string{"a/setup.sh", "./build.sh", "c.sh"}},
		{[]string{"sh", "-c", "echo x | sh; sh -c true"}, nil},
		{[]string{"sh", "-c", ". ./env; exec tools/x"}, []string{"./env", "tools/x"}},
	} {
		expect.Slices(t, Files(row.args), row.want, "%q", row.args)
	}
}

func TestInterpreter(t *testing.T) {
	for script, want := range map[string]int{
		"#!/bin/sh\ntrue\n": 10, "#! /usr/bin/env bash\n": 21, "#!/bin/bash -eu\nx": 16, "#!/usr/bin/python3\n": 0,
		"true\n": 0, "": 0, "#!/bin/sh": 0, "#!/usr/bin/fish\n": 0,
	} {
		expect.Equal(t, Interpreter(script), want, "%q", script)
	}
}
