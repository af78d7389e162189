// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"math"
)

// Plans and reports travel between processes of one executable for every run: field after field, numbers as varints,
// texts with their length. A base and conditions, which are rare, are JSON.

// Append appends the plan's encoding to b.
func (p *Plan) Append(b []byte) ([]byte, error) {
	var base []byte
	if p.Base != nil {
		var err error
		if base, err = json.Marshal(p.Base); err != nil {
			return nil, err
		}
	}
	b = appendText(b, string(base))
	b = binary.AppendUvarint(b, uint64(len(p.Ops)))
	for _, o := range p.Ops {
		b = appendText(b, string(o.Kind))
		b = appendText(b, o.Target)
		b = appendText(b, o.Source)
		b = binary.AppendVarint(b, int64(o.Image))
		b = binary.AppendVarint(b, o.Bytes)
		b = binary.AppendUvarint(b, o.Attrs)
		b = binary.AppendUvarint(b, uint64(len(o.Lower)))
		for _, l := range o.Lower {
			b = appendText(b, l.Source)
			b = binary.AppendVarint(b, int64(l.Image))
		}
	}
	for _, list := range [][]string{p.Args, p.Env, p.Writable, p.Owned} {
		b = appendTexts(b, list)
	}
	b = appendText(b, p.Dir)
	var flags uint64
	for i, set := range []bool{p.Workspace, p.Terminal, p.SameNetwork, p.Conditions != nil} {
		if set {
			flags |= 1 << i
		}
	}
	b = binary.AppendUvarint(b, flags)
	if p.Conditions != nil {
		conditions, err := json.Marshal(p.Conditions)
		if err != nil {
			return nil, err
		}
		b = appendText(b, string(conditions))
	}
	b = binary.AppendUvarint(b, uint64(len(p.Addresses)))
	for _, a := range p.Addresses {
		b = append(b, a[:]...)
	}
	b = binary.AppendUvarint(b, uint64(len(p.Listeners)))
	for _, l := range p.Listeners {
		b = append(b, l.Address[:]...)
		b = binary.AppendUvarint(b, uint64(l.Port))
	}
	b = binary.AppendUvarint(b, uint64(len(p.Rlimits)))
	for _, r := range p.Rlimits {
		b = binary.AppendVarint(b, int64(r.Resource))
		b = binary.AppendUvarint(b, r.Value)
	}
	return b, nil
}

// Append appends the report's encoding to b.
func (r *Report) Append(b []byte) []byte {
	switch {
	case r.Ready:
		return append(b, reportReady)
	case r.Listening:
		return append(b, reportListening)
	case r.Resolving:
		return append(b, reportResolving)
	case r.Started != 0:
		return binary.AppendVarint(append(b, reportStarted), r.Started)
	case r.Exited != nil:
		b = append(b, reportExited)
		for _, v := range []int64{int64(r.Exited.Code), int64(r.Exited.Signal), r.Exited.At} {
			b = binary.AppendVarint(b, v)
		}
		return appendText(b, r.Exited.Missing)
	case r.Unwritable != nil:
		return appendTexts(append(b, reportUnwritable), r.Unwritable)
	case r.Reaped != nil:
		b = append(b, reportReaped)
		for _, v := range r.Reaped.numbers() {
			b = binary.AppendVarint(b, *v)
		}
		return appendTexts(b, r.Reaped.Full)
	}
	if r.Lost != "" {
		return append(append(b, reportLost), r.Lost...)
	}
	return append(append(b, reportFailed), r.Failed...)
}

// The first byte of a report.
const (
	reportReady      = 'w'
	reportListening  = 'l'
	reportResolving  = 'd'
	reportUnwritable = 'u'
	reportStarted    = 's'
	reportFailed     = 'f'
	reportLost       = 'x'
	reportExited     = 'e'
	reportReaped     = 'r'
)

func (r *Reaped) numbers() []*int64 {
	return []*int64{&r.UserNS, &r.SystemNS, &r.PeakRSS, &r.ReadBlocks, &r.Written, &r.Voluntary, &r.Involuntary, &r.Killed, &r.Released}
}

// DecodeReport is the inverse of Append.
func DecodeReport(b []byte) (*Report, error) {
	if len(b) == 0 {
		return nil, errMalformed
	}
	d := &decoder{b: b[1:]}
	r := &Report{}
	switch b[0] {
	case reportReady:
		r.Ready = true
	case reportListening:
		r.Listening = true
	case reportResolving:
		r.Resolving = true
	case reportStarted:
		r.Started = d.varint()
	case reportFailed:
		r.Failed, d.b = string(d.b), nil
	case reportLost:
		r.Lost, d.b = string(d.b), nil
	case reportExited:
		r.Exited = &Exited{Code: int(d.varint()), Signal: int(d.varint()), At: d.varint(), Missing: d.text()}
	case reportReaped:
		r.Reaped = &Reaped{}
		for _, v := range r.Reaped.numbers() {
			*v = d.varint()
		}
		r.Reaped.Full = d.texts()
	case reportUnwritable:
		r.Unwritable = d.texts()
	default:
		return nil, errMalformed
	}
	if d.short || len(d.b) > 0 {
		return nil, errMalformed
	}
	return r, nil
}

var errMalformed = errors.New("malformed message")

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func appendTexts(b []byte, list []string) []byte {
	b = binary.AppendUvarint(b, uint64(len(list)))
	for _, s := range list {
		b = appendText(b, s)
	}
	return b
}

// decodePlan is the inverse of Plan.Append.
func decodePlan(b []byte) (*Plan, error) {
	d := &decoder{b: b}
	p := &Plan{}
	if base := d.text(); base != "" {
		p.Base = &Base{}
		if err := json.Unmarshal([]byte(base), p.Base); err != nil {
			return nil, err
		}
	}
	p.Ops = make([]Op, d.length())
	for i := range p.Ops {
		p.Ops[i] = Op{
			Kind: OpKind(d.text()), Target: d.text(), Source: d.text(),
			Image: int(d.varint()), Bytes: d.varint(), Attrs: d.uvarint(),
		}
		if n := d.length(); n > 0 {
			p.Ops[i].Lower = make([]Lower, n)
		}
		for j := range p.Ops[i].Lower {
			p.Ops[i].Lower[j] = Lower{Source: d.text(), Image: int(d.varint())}
		}
	}
	for _, list := range []*[]string{&p.Args, &p.Env, &p.Writable, &p.Owned} {
		*list = d.texts()
	}
	p.Dir = d.text()
	flags := d.uvarint()
	var unusual bool
	for i, set := range []*bool{&p.Workspace, &p.Terminal, &p.SameNetwork, &unusual} {
		*set = flags&(1<<i) != 0
	}
	if unusual {
		if err := json.Unmarshal([]byte(d.text()), &p.Conditions); err != nil {
			return nil, err
		}
	}
	p.Addresses = make([][4]byte, d.length())
	for i := range p.Addresses {
		copy(p.Addresses[i][:], d.bytes(4))
	}
	p.Listeners = make([]Listener, d.length())
	for i := range p.Listeners {
		copy(p.Listeners[i].Address[:], d.bytes(4))
		p.Listeners[i].Port = uint16(d.uvarint())
	}
	p.Rlimits = make([]Rlimit, d.length())
	for i := range p.Rlimits {
		p.Rlimits[i] = Rlimit{int(d.varint()), d.uvarint()}
	}
	if d.short || len(d.b) > 0 {
		return nil, errMalformed
	}
	return p, nil
}

// A decoder consumes fields from the front of b, and returns zero values once one is cut off.
type decoder struct {
	b     []byte
	short bool
}

func (d *decoder) uvarint() uint64 {
	v, n := binary.Uvarint(d.b)
	d.skip(n)
	return v
}

func (d *decoder) varint() int64 {
	v, n := binary.Varint(d.b)
	d.skip(n)
	return v
}

// skip consumes a number of n bytes; n <= 0 means that it was cut off.
func (d *decoder) skip(n int) {
	if n <= 0 {
		d.short, n = true, 0
	}
	d.b = d.b[n:]
}

// length returns a number of fields or bytes that follow.
func (d *decoder) length() int {
	n := d.uvarint()
	if n > uint64(len(d.b)) || n > math.MaxInt32 {
		d.short = true
		return 0
	}
	return int(n)
}

func (d *decoder) texts() []string {
	list := make([]string, d.length())
	for i := range list {
		list[i] = d.text()
	}
	return list
}

func (d *decoder) text() string { return string(d.bytes(d.length())) }

func (d *decoder) bytes(n int) []byte {
	if n > len(d.b) {
		d.short = true
		return nil
	}
	field := d.b[:n]
	d.b = d.b[n:]
	return field
}
