// SPDX-License-Identifier: Apache-2.0

package reproduction

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/worker/repro"
)

// checkProof returns an error if the runs are equal but prove nothing: a command that fails every time may have ended
// before it wrote anything, and an output that is never produced cannot differ.
func (c *Config) checkProof(ctx context.Context, v *repro.Verdict, executors []repro.Executor) error {
	if c.AllowFailure || c.Which.Failed || !v.Result.AllEqual() {
		return nil
	}
	first := v.Runs[0]
	if first.ExitCode != 0 || first.Code != "" {
		return fmt.Errorf("the command fails in all %d runs with %s%s, which proves nothing; %s, or pass --allow-failure",
			len(v.Runs), first.Ended(), lastLine(ctx, v, executors[0].Store), cmp.Or(c.ExplainAbsent(), "fix the command"))
	}
	if missing := c.MissingOutputs(first.Result); len(missing) > 0 {
		return fmt.Errorf("no run produced %s, which proves nothing; correct the command or --out, or pass --allow-failure", strings.Join(missing, ", "))
	}
	return nil
}

// lastLine returns the last line that the first run wrote to stderr, which usually explains the failure.
func lastLine(ctx context.Context, v *repro.Verdict, store cas.Store) string {
	const limit = 1 << 20
	text := v.Runs[0].Result.GetStderrRaw()
	if d, err := cas.FromProto(v.Function(), v.Runs[0].Result.GetStderrDigest()); len(text) == 0 && err == nil && d.Size() <= limit {
		text, _ = cas.ReadAll(ctx, store, d, limit) // the message is complete without
	}
	text = bytes.TrimSpace(text)
	if text = text[bytes.LastIndexByte(text, '\n')+1:]; len(text) == 0 {
		return ""
	}
	return " (" + printable.Head(strings.TrimPrefix(string(text), "cloister: "), 200) + ")"
}
