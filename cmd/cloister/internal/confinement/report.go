// SPDX-License-Identifier: Apache-2.0

package confinement

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/jobobject"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/seatbelt"
	"github.com/cloister-build/cloister/sandbox/toolchain"
)

// A Report lists the protections of a machine.
type Report struct {
	Checks []Check `json:"checks"`
	Tier   string  `json:"tier"`
}

// A Check is a protection, or a property of the machine. The Result is ok, off, or FAIL if actions cannot run without
// it.
type Check struct {
	Result string `json:"result"`
	Name   string `json:"name"`
	Detail string `json:"detail"`
	Fix    string `json:"fix,omitempty"`
	// Code identifies the reason why a backend or a protection does not work here: see cloister explain.
	Code string `json:"code,omitempty"`
}

// NewReport returns the report of a machine whose probe returned f. With probed it includes what runs can vary. The
// report is valid even if the toolchain of this host cannot be read, which is the error.
func NewReport(ctx context.Context, f sandbox.Features, probed bool) (*Report, error) {
	r := &Report{Tier: TierText(f)}
	for _, c := range f.Checks {
		result := "ok"
		switch {
		case !c.OK && c.Required:
			result = "FAIL"
		case !c.OK:
			result = "off"
		}
		k := Check{Result: result, Name: c.Name, Detail: c.Detail, Fix: c.Fix}
		if !c.OK && strings.HasSuffix(c.Detail, " ("+noCgroup+")") {
			k.Code = noCgroup
		}
		r.Checks = append(r.Checks, k)
	}
	if probed {
		r.Checks = append(r.Checks, onRequest(f.Limits), conditions(f.Conditions))
	}
	inputs, err := sandbox.HostToolchain()
	if err != nil {
		return r, err
	}
	var targets []string
	for _, in := range inputs {
		targets = append(targets, in.Target)
	}
	r.Checks = append(r.Checks, Check{Result: "ok", Name: "toolchain of this host", Detail: strings.Join(targets, " ")})
	scan, err := toolchain.Read(ctx, inputs)
	if err == nil {
		detail := fmt.Sprintf("%s of %d files", scan.Fingerprint, scan.Entries)
		r.Checks = append(r.Checks, Check{Result: "ok", Name: "fingerprint", Detail: detail})
	}
	return r, err
}

// noCgroup is the only code in the details of missing protections. Other text in parentheses at the end of a detail,
// such as file system options, is not a code.
const noCgroup = "cgroup_unavailable"

// SetCode adds the code of the error of a probe to the check that failed.
func (r *Report) SetCode(err error) {
	if i := slices.IndexFunc(r.Checks, func(c Check) bool { return c.Result == "FAIL" }); i >= 0 {
		r.Checks[i].Code = codeOf(err)
	}
}

// codeOf returns the code of the reason why a backend does not work here, or "".
func codeOf(err error) string {
	if reason, ok := errors.AsType[interface {
		error
		Code() string
	}](err); ok {
		return reason.Code()
	}
	return ""
}

// tiers are the values of --sandbox that select a backend each, and the name of that backend.
var tiers = []struct{ tier, backend string }{
	{"full", "namespace"},
	{gVisor, gVisor},
	{qemuKVM, qemuKVM},
	{qemuTCG, qemuTCG},
	{microVM, microVM},
	{seatbelt.Name, seatbelt.Name},
	{jobobject.Name, jobobject.Name},
}

// Others returns a check for each backend that --sandbox does not select: what it enforces here. Only emulated machines,
// which take long to boot, are not tried.
func (c *Flags) Others(ctx context.Context) []Check {
	var checks []Check
	for _, o := range tiers {
		if o.tier == c.Tier || o.tier == "full" && !c.named() {
			continue
		}
		k := Check{Result: "off", Name: "backend " + o.backend}
		if o.tier == qemuTCG && runtime.GOOS == "linux" {
			k.Detail = "not tried: virtual machines on an emulated processor, for tests only, are slow and no security boundary; see cloister check --sandbox " + qemuTCG
			checks = append(checks, k)
			continue
		}
		b := (&Flags{Tier: o.tier}).NewBackend(namespace.Config{})
		f, err := b.Probe(ctx)
		if err = errors.Join(err, b.Close()); err != nil {
			k.Detail, k.Code = err.Error(), codeOf(err)
		} else {
			k.Result, k.Detail = "ok", "--sandbox "+o.tier+" enforces "+enforced(&f)
		}
		checks = append(checks, k)
	}
	return checks
}

// enforced returns the layers and the tier of a backend that works here, and the names of what it does not enforce.
func enforced(f *sandbox.Features) string {
	text := fmt.Sprintf("%s (%s)", strings.Join(f.Layers, ", "), TierText(*f))
	var off []string
	for _, c := range f.Checks {
		if !c.OK {
			off = append(off, c.Name)
		}
	}
	if len(off) > 0 {
		text += "; not " + strings.Join(off, ", ")
	}
	return text
}

// WriteText prints r for a person.
func (r *Report) WriteText(out io.Writer) error {
	var text strings.Builder
	for _, c := range r.Checks {
		fmt.Fprintf(&text, "%-4s  %-24s %s\n", c.Result, c.Name, c.Detail)
		if c.Fix != "" {
			fmt.Fprintf(&text, "      %-24s fix: %s\n", "", c.Fix)
		}
	}
	fmt.Fprintf(&text, "tier  %s\n", r.Tier)
	_, err := io.WriteString(out, text.String())
	return err
}

// onRequest describes which limits an action may request that no built-in profile has. The tier does not depend on
// them.
func onRequest(given []sandbox.Limit) Check {
	c := Check{Result: "ok", Name: "limits on request"}
	var can, cannot []string
	for _, l := range []sandbox.Limit{sandbox.LimitMilliCPUs, sandbox.LimitDiskRate} {
		if slices.Contains(given, l) {
			can = append(can, string(l))
		} else {
			cannot = append(cannot, string(l))
		}
	}
	c.Detail = cmp.Or(strings.Join(can, ", "), "none")
	if len(cannot) > 0 {
		c.Result = "off"
		c.Detail += "; not " + strings.Join(cannot, ", ") + ": an action that requests it is refused"
	}
	return c
}

// conditions describes which conditions of a run can be varied.
func conditions(given []sandbox.Condition) Check {
	can, cannot := "", ""
	for _, c := range sandbox.AllConditions {
		if slices.Contains(given, c) {
			can += ", " + string(c)
		} else {
			cannot += ", " + string(c)
		}
	}
	c := Check{Result: "ok", Name: "conditions", Detail: "runs can vary" + strings.TrimPrefix(can, ",")}
	if cannot != "" {
		c.Result = "off"
		c.Detail += "; but not" + strings.TrimPrefix(cannot, ",")
	}
	if can == "" {
		c.Detail = "runs cannot vary any"
	}
	return c
}
