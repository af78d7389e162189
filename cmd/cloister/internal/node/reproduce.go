// SPDX-License-Identifier: Apache-2.0

package node

import (
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/worker"
)

// maxWord bounds, in bytes, each word of the command line that reruns an action.
const maxWord = 1000

// reproduce returns the command line that reruns the action of t, or "" if it holds text that cannot be typed. flags
// name the server and its policy.
func reproduce(t *worker.Task, flags []string) string {
	words := append([]string{"cloister", "run", "--action", t.Action.String()}, flags...)
	for _, f := range [][2]string{{"--instance", t.Instance}, {"--target", t.Target}, {"--mnemonic", t.Mnemonic}} {
		if f[1] != "" {
			words = append(words, f[0], f[1])
		}
	}
	for _, w := range words {
		if printable.Head(w, maxWord) != w {
			return ""
		}
	}
	return render.QuoteAll(words)
}
