// SPDX-License-Identifier: Apache-2.0

package gate

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/xml"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cmd/cloister/internal/attestation"
	"github.com/cloister-build/cloister/worker/repro/attest"
)

// lines returns why a step is not clean, one reason a line.
func (s *stepReport) lines() []string {
	var all []string
	for _, v := range s.Violations {
		all = append(all, v.Text)
	}
	if s.Message != "" {
		all = append(all, s.Message)
	}
	return append(all, s.Denied...)
}

// junit returns the report as JUnit XML: a test case a step. It has no times, which differ between runs.
func (r *Report) junit() []byte {
	type problem struct {
		Type    string `xml:"type,attr"`
		Message string `xml:"message,attr"`
		Text    string `xml:",chardata"`
	}
	type testCase struct {
		Class   string   `xml:"classname,attr"`
		Name    string   `xml:"name,attr"`
		Failure *problem `xml:"failure"`
		Error   *problem `xml:"error"`
		Skipped *problem `xml:"skipped"`
	}
	type property struct {
		Name  string `xml:"name,attr"`
		Value string `xml:"value,attr"`
	}
	suite := struct {
		XMLName    xml.Name   `xml:"testsuite"`
		Name       string     `xml:"name,attr"`
		Tests      int        `xml:"tests,attr"`
		Failures   int        `xml:"failures,attr"`
		Errors     int        `xml:"errors,attr"`
		Skipped    int        `xml:"skipped,attr"`
		Properties []property `xml:"properties>property"`
		Cases      []testCase `xml:"testcase"`
	}{Name: "cloister gate", Tests: len(r.Steps), Properties: []property{{"sandbox", r.Sandbox.String()}}}
	for i := range r.Steps {
		s := &r.Steps[i]
		c := testCase{Class: "hermetic", Name: s.ID}
		p := &problem{s.Verdict, fmt.Sprintf("%s, exit code %d", s.Verdict, s.ExitCode), strings.Join(s.lines(), "\n")}
		switch s.Verdict {
		case clean, unseen:
		case violated, failed, timedOut:
			c.Failure = p
			suite.Failures++
		case notRun:
			c.Skipped = p
			suite.Skipped++
		default:
			c.Error = p
			suite.Errors++
		}
		suite.Cases = append(suite.Cases, c)
	}
	var b bytes.Buffer
	b.WriteString(xml.Header)
	enc := xml.NewEncoder(&b)
	enc.Indent("", "  ")
	_ = enc.Encode(&suite) // never fails: it has texts and numbers only
	b.WriteByte('\n')
	return b.Bytes()
}

// object is a JSON object, whose keys are encoded in order.
type object = map[string]any

// sarif returns the violations in SARIF 2.1.0, each at the line of its step in the policy.
func (r *Report) sarif() object {
	level := "error"
	if r.Mode == modeReport {
		level = "warning"
	}
	var kinds []string
	results, rules := []object{}, []object{}
	for i := range r.Steps {
		s := &r.Steps[i]
		for _, v := range s.Violations {
			kinds = append(kinds, v.Kind)
			results = append(results, object{
				"ruleId": "hermetic/" + v.Kind, "level": level,
				"message": object{"text": fmt.Sprintf("step %s: %s", s.ID, v.Text)},
				"locations": []object{{"physicalLocation": object{
					"artifactLocation": object{"uri": r.Policy.File}, "region": object{"startLine": s.Line},
				}}},
			})
		}
	}
	slices.Sort(kinds)
	for _, k := range slices.Compact(kinds) {
		rules = append(rules, object{"id": "hermetic/" + k})
	}
	return object{
		"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0",
		"runs": []object{{"tool": object{"driver": object{"name": "cloister gate", "rules": rules}}, "results": results, "properties": object{"sandbox": r.Sandbox.String()}}},
	}
}

// sign writes a statement about every file of the evidence, if it is requested.
func (g *gate) sign(ctx context.Context) error {
	if g.Attest.Path == "" {
		return nil
	}
	var files []attest.Descriptor
	root := os.DirFS(g.evidence.final)
	err := fs.WalkDir(root, ".", func(name string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		text, err := fs.ReadFile(root, name)
		sum := sha256.Sum256(text)
		digest := map[string]string{"sha256": hex.EncodeToString(sum[:])}
		files = append(files, attest.Descriptor{Name: name, Digest: digest})
		return err
	})
	if err != nil {
		return err
	}
	return g.Attest.Write(ctx, &attest.Statement{Subjects: files, Provenance: &attest.Provenance{
		BuildDefinition: attest.BuildDefinition{
			BuildType: attest.BuildType,
			ExternalParameters: attest.Parameters{
				Arguments: []string{"cloister", "gate", "--mode", g.Mode, "--policy", g.report.Policy.File},
			},
			InternalParameters: map[string]string{"verdict": g.report.Verdict, "tier": g.report.Sandbox.Tier},
			ResolvedDependencies: []attest.Descriptor{
				{Name: "source revision", Digest: map[string]string{"gitCommit": g.report.Revision}},
				{Name: g.report.Policy.File, Digest: map[string]string{"sha256": g.report.Policy.SHA256}},
			},
		},
		RunDetails: attest.RunDetails{Builder: attest.Builder{ID: attestation.BuilderID}},
	}}, g.key)
}
