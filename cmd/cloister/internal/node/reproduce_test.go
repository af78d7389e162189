// SPDX-License-Identifier: Apache-2.0

package node

import (
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/worker"
)

func TestReproduceCanBePasted(t *testing.T) {
	d := cas.SHA256.Sum([]byte("x"))
	run := "cloister run --action " + d.String()
	for _, c := range []struct {
		name  string
		task  worker.Task
		flags []string
		want  string
	}{
		{"plain", worker.Task{}, nil, run},
		{"instance", worker.Task{Instance: "main/a-b"}, nil, run + " --instance main/a-b"},
		{"quotes", worker.Task{Instance: "it's; rm"}, nil, run + ` --instance 'it'\''s; rm'`},
		{
			"flags",
			worker.Task{Target: "//a:b c", Mnemonic: "TestRunner"},
			[]string{"--cas", "grpc://[::1]:9"},
			run + " --cas 'grpc://[::1]:9' --target '//a:b c' --mnemonic TestRunner",
		},
		{"line end", worker.Task{Instance: "a\nb"}, nil, ""},
	} {
		c.task.Action = d
		expect.Equal(t, reproduce(&c.task, c.flags), c.want, "%s", c.name)
	}
}
