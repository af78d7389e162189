// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"fmt"
	"strings"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/buildinfo"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/cloister-build/cloister/worker/repro/attest"
)

// OfVerdict returns the statement of a verdict, with the runs that it follows from.
func OfVerdict(v *repro.Verdict) (*attest.Statement, error) {
	action, err := cas.ParseDigest(v.Action)
	if err != nil {
		return nil, err
	}
	d := descriptors{function: action.Function()}
	p := &attest.Reproducibility{
		Verdict:   string(v.Result),
		Action:    d.of(action.String(), action),
		Tool:      "cloister " + buildinfo.Version,
		NotVaried: map[string]string{},
	}
	for _, f := range v.Skipped {
		p.NotVaried[string(f.Factor)] = f.Why
	}
	for i := range v.Runs {
		run := &v.Runs[i]
		of := descriptors{function: action.Function()}
		outputs := of.outputs(run.Result)
		for j := range outputs {
			// Directories are compared by their roots, so the verdict follows only from these.
			if root := run.Root(outputs[j].Name); root != nil && outputs[j].MediaType == mediaTree {
				outputs[j], outputs[j].MediaType = of.proto(outputs[j].Name, root), mediaDirectory
			}
		}
		p.Runs = append(p.Runs, attest.Run{
			Worker: run.Worker, On: run.On, Varied: run.Varied, StableHash: run.StableHash, StartedOn: run.Start, FinishedOn: run.End,
			ExitCode: run.ExitCode, Code: run.Code, Outputs: outputs,
			Stdout: of.log(run.Result.StdoutDigest, run.Result.StdoutRaw), Stderr: of.log(run.Result.StderrDigest, run.Result.StderrRaw),
		})
		if of.err != nil {
			return nil, fmt.Errorf("run %d: %w", i+1, of.err)
		}
	}
	for i := range v.Differences {
		diff := &v.Differences[i]
		cause := string(diff.Cause)
		if cause == "" {
			cause = "unknown"
		}
		p.Causes = append(p.Causes, fmt.Sprintf("%s: %s: %s", strings.Join(diff.Where, ": "), diff.What, cause))
	}
	return &attest.Statement{Subjects: p.Subjects(), Reproducibility: p}, nil
}
