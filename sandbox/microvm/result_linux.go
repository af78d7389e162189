// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"golang.org/x/sys/unix"
)

// A runAnswer is an answer to a run, which may be hostile.
type runAnswer struct {
	Result *untrusted
	Took   time.Duration
	Error  string
	Kind   string
}

// An untrusted result has lists that are not decoded yet, since a short text may describe a long list.
type untrusted struct {
	sandbox.Result
	Events, Opened, Executed json.RawMessage
}

// checked returns the result, or an error if no run of spec has it.
func (u *untrusted) checked(spec *sandbox.Spec) (*sandbox.Result, error) {
	if u == nil {
		return nil, errors.New("there is none")
	}
	res := u.Result
	var errs [3]error
	res.Events, errs[0] = decodeList[sandbox.Event](u.Events, sandbox.MaxEvents+len(sandbox.AllLimits))
	res.Opened, errs[1] = decodeList[string](u.Opened, 0) // no run is audited in full
	res.Executed, errs[2] = decodeList[string](u.Executed, maxExecuted)
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	return &res, check(spec, &res)
}

// maxExecuted is the number of files that package namespace reports as executed.
const maxExecuted = 10_000

// decodeList decodes a list of at most limit elements.
func decodeList[T any](text json.RawMessage, limit int) ([]T, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	start, err := d.Token()
	if len(text) == 0 || start == nil && err == nil { // absent, null
		return nil, nil
	}
	if start != json.Delim('[') {
		return nil, fmt.Errorf("%.20q is not a list", text)
	}
	var list []T
	for d.More() {
		if len(list) == limit {
			return nil, fmt.Errorf("a list of more than %d elements", limit)
		}
		var v T
		if err := d.Decode(&v); err != nil {
			return nil, err
		}
		list = append(list, v)
	}
	return list, nil
}

// check returns an error for a result that no run of spec has. Guests may be hostile: a result may be wrong, but not
// malformed.
func check(spec *sandbox.Spec, res *sandbox.Result) error {
	if res.ExitCode < 0 || res.ExitCode > 255 || res.Signal < 0 || res.Signal > 64 || res.Signal != 0 && res.ExitCode != 128+int(res.Signal) {
		return fmt.Errorf("exit code %d with signal %d", res.ExitCode, int(res.Signal))
	}
	if len(res.Events) > sandbox.MaxEvents+len(sandbox.AllLimits) || res.Unrecorded < 0 || res.Unrecorded > maxCount {
		return fmt.Errorf("%d events, %d unrecorded", len(res.Events), res.Unrecorded)
	}
	if res.KilledForViolation && len(spec.Kill) == 0 {
		return errors.New("killed for a violation that may not end it")
	}
	events := res.Events
	if res.Exceeded != nil {
		events = append(slices.Clip(events), *res.Exceeded)
	}
	if res.Exceeded != nil && res.Exceeded.Kind != sandbox.EventLimit {
		return fmt.Errorf("exceeded an event of kind %.40q", string(res.Exceeded.Kind))
	}
	for _, e := range events {
		if err := checkEvent(spec, &e); err != nil {
			return err
		}
	}
	if len(res.Opened) > 0 || spec.Audit == sandbox.AuditOff && (len(res.Executed) > 0 || res.ExecutedAll) {
		return fmt.Errorf("%d opened and %d executed files, which were not asked for", len(res.Opened), len(res.Executed))
	}
	if err := checkExecuted(spec, res.Executed); err != nil {
		return err
	}
	u := &res.Usage
	for _, n := range []int64{
		int64(u.User), int64(u.System), u.PeakRSS, u.PeakMemory, u.PeakProcesses, u.ReadBytes, u.WrittenBytes, u.VoluntarySwitches,
		u.InvoluntarySwitches, u.PacketsRefused,
	} {
		if n < 0 || n > maxCount {
			return fmt.Errorf("usage %+v", *u)
		}
	}
	return nil
}

// maxCount bounds each number in a result, so that sums over many results do not overflow: 104 days in nanoseconds, or
// 8 PiB.
const maxCount = 1 << 53

// checkEvent returns an error for an event that no run of spec has.
func checkEvent(spec *sandbox.Spec, e *sandbox.Event) error {
	if !slices.Contains(eventKinds, e.Kind) || e.Count < 1 || e.Count > maxCount {
		return fmt.Errorf("an event of kind %.40q, %d times", string(e.Kind), e.Count)
	}
	if spec.Audit == sandbox.AuditOff && e.Kind != sandbox.EventLimit {
		return fmt.Errorf("an event of kind %q without an audit", string(e.Kind))
	}
	fills := func(t sandbox.Temp) bool { return e.Subject == "room in "+t.Target }
	l := sandbox.Limit(e.Subject)
	if e.Kind == sandbox.EventLimit && !slices.Contains(sandbox.AllLimits, l) && !slices.ContainsFunc(spec.Temp, fills) {
		return fmt.Errorf("an event about the unknown limit %.40q", e.Subject)
	}
	if e.Unit != "" && e.Unit != "bytes" && e.Unit != l.Unit() {
		return fmt.Errorf("an event with the unit %.40q", e.Unit)
	}
	if err := checkEndpoint(e); err != nil {
		return err
	}
	for _, text := range []string{e.Subject, e.Syscall, e.Process, e.Actual, e.Limit, e.Detail} {
		if len(text) > maxText {
			return fmt.Errorf("an event of %d bytes", len(text))
		}
	}
	return nil
}

// checkEndpoint returns an error if an event has an endpoint that those of its kind do not have. No run reaches one.
func checkEndpoint(e *sandbox.Event) error {
	if e.Endpoint == (sandbox.Endpoint{}) {
		return nil
	}
	addr, err := netip.ParseAddr(e.Endpoint.Host)
	if err != nil || addr.Zone() != "" || e.Kind != sandbox.EventConnect && e.Kind != sandbox.EventUnreachable {
		return fmt.Errorf("an event of kind %q with the endpoint %.80q", string(e.Kind), e.Endpoint.Host)
	}
	return nil
}

// checkExecuted returns an error unless paths are sorted, unique and below inputs of spec or outputs, which may contain
// inputs.
func checkExecuted(spec *sandbox.Spec, paths []string) error {
	var dirs []string
	for _, in := range spec.Inputs {
		dirs = append(dirs, in.Target)
	}
	for _, o := range spec.Outputs { // and of each Lower
		dirs = append(dirs, o.Target)
	}
	last := ""
	for _, p := range paths {
		within := func(dir string) bool { return p == dir || strings.HasPrefix(p, strings.TrimSuffix(dir, "/")+"/") }
		if path.Clean(p) != p || len(p) > unix.PathMax || p <= last || !slices.ContainsFunc(dirs, within) {
			return fmt.Errorf("the executed file %.200q after %.200q", p, last)
		}
		last = p
	}
	return nil
}

// maxText bounds each text of an event, in bytes.
const maxText = 16 << 10

// eventKinds are the kinds that namespaces record without endpoints.
var eventKinds = []sandbox.EventKind{
	sandbox.EventConnect, sandbox.EventUnreachable, sandbox.EventWrite, sandbox.EventRead, sandbox.EventExec, sandbox.EventSyscall, sandbox.EventLimit,
}
