// SPDX-License-Identifier: Apache-2.0

package seccomp

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"golang.org/x/sys/unix"
)

// Answers of a filter. A call of another architecture (a 32-bit program) gets SIGSYS: after an error some C libraries
// retry exiting forever, and killing would fill the host's log.
const (
	returnAllow  = unix.SECCOMP_RET_ALLOW
	returnNotify = unix.SECCOMP_RET_USER_NOTIF
	returnErrno  = unix.SECCOMP_RET_ERRNO
	returnTrap   = unix.SECCOMP_RET_TRAP
)

// Offsets in the kernel's struct seccomp_data. Both architectures are little-endian.
const (
	offsetNumber = 0
	offsetArch   = 4
	offsetArgs   = 16
)

// Program returns the filter of a run for the architecture this is compiled for. On others than amd64 and arm64 it
// permits nothing.
func Program(c Config) []unix.SockFilter {
	return compile(index(rules), c, returnErrno|uint32(unix.ENOSYS))
}

// InitFilter returns the filter that pid 1 of a run installs once the command runs. Refused calls fail with EPERM.
func InitFilter() []unix.SockFilter {
	return compile(index(initRules), Config{}, returnErrno|uint32(unix.EPERM))
}

// answer returns the kernel's answer for a verdict.
func (c Config) answer(r *rule, v verdict) uint32 {
	switch v {
	case clock, random, startup, openRead, statFile, statOpen, listing, binding:
		if v == clock && c.Clock || v == random && c.Random || v == startup && (c.Clock || c.Random) ||
			v == openRead && (c.Random || c.Monitor == MonitorFull) || v == statFile && (c.Clock || c.Files || c.Monitor == MonitorFull) ||
			v == statOpen && (c.Clock || c.Files) || v == listing && c.Files ||
			v == binding && !c.Listen && c.Monitor != MonitorOff {
			return returnNotify
		}
		return returnAllow
	}
	switch {
	case v == allow, v == listen && c.Listen, v == report && c.Monitor == MonitorOff, v == lookup && c.Monitor != MonitorFull:
		return returnAllow
	case v == absent:
		return returnErrno | uint32(unix.ENOSYS)
	case v == omit:
		return returnErrno // 0
	case c.Monitor != MonitorOff:
		return returnNotify
	case r.errno != 0:
		return returnErrno | uint32(r.errno)
	}
	return returnErrno | uint32(unix.EPERM)
}

// A span is a range of numbers, up to the next span, with one answer: a constant or a rule that checks arguments.
type span struct {
	first uint32
	ret   uint32
	rule  *rule
}

// compile returns a program that finds the span of a number by binary search. When a filter is installed the kernel
// runs it for every number, to learn which calls it can always allow; short paths make that cheap.
func compile(byNumber []*rule, c Config, unknown uint32) []unix.SockFilter {
	var spans []span
	add := func(s span) {
		if n := len(spans); n == 0 || spans[n-1].ret != s.ret || spans[n-1].rule != s.rule {
			spans = append(spans, s)
		}
	}
	for nr, r := range byNumber {
		s := span{first: uint32(nr), ret: unknown}
		if r != nil {
			s.ret = c.answer(r, r.otherwise)
			if len(r.cases) > 0 && (c.answer(r, r.then) != s.ret || len(r.allowed) > 0 && s.ret != returnAllow) {
				s.ret, s.rule = 0, r
			}
		}
		add(s)
	}
	// All higher numbers, including negative ones and those of x32.
	add(span{first: uint32(len(byNumber)), ret: unknown})

	var bodies []unix.SockFilter
	starts := map[*rule]int{}
	for _, s := range spans {
		if _, ok := starts[s.rule]; !ok && s.rule != nil {
			starts[s.rule] = len(bodies)
			bodies = append(bodies, c.body(s.rule)...)
		}
	}
	tree := search(spans, starts)
	for i := range tree {
		if tree[i].Code == goTo {
			tree[i].K += uint32(len(tree) - i - 1) // the bodies follow the tree
		}
	}
	return slices.Concat([]unix.SockFilter{
		load(offsetArch),
		branch(unix.BPF_JEQ, arch, 1, 0),
		ret(returnTrap),
		load(offsetNumber),
	}, tree, bodies)
}

// search returns a balanced tree of comparisons. The leaf of a rule jumps to the rule's start, counted from the end of
// the tree.
func search(spans []span, starts map[*rule]int) []unix.SockFilter {
	if len(spans) == 1 {
		if r := spans[0].rule; r != nil {
			return []unix.SockFilter{{Code: goTo, K: uint32(starts[r])}}
		}
		return []unix.SockFilter{ret(spans[0].ret)}
	}
	middle := len(spans) / 2
	lower, upper := search(spans[:middle], starts), search(spans[middle:], starts)
	return slices.Concat([]unix.SockFilter{branch(unix.BPF_JGE, spans[middle].first, len(lower), 0)}, lower, upper)
}

// body returns the code of a rule: its cases in order.
func (c Config) body(r *rule) []unix.SockFilter {
	var code []unix.SockFilter
	add := func(cases []all, answer uint32) {
		for _, conditions := range cases {
			var block []unix.SockFilter
			for _, condition := range conditions {
				block = append(block, condition.code()...)
			}
			block = append(block, ret(answer))
			for i := range block {
				if block[i].Jf == fails {
					block[i].Jf = uint8(len(block) - i - 1)
				}
			}
			code = append(code, block...)
		}
	}
	add(r.allowed, returnAllow)
	add(r.cases, c.answer(r, r.then))
	return append(code, ret(c.answer(r, r.otherwise)))
}

// fails stands for the jump out of a block whose length is not known yet.
const fails = math.MaxUint8

// code falls through if the condition holds. Values have 32 bits, so the masked upper half must be zero.
func (c condition) code() []unix.SockFilter {
	var code []unix.SockFilter
	half := func(offset int, mask uint32, values ...uint32) {
		if mask == 0 {
			return
		}
		code = append(code, load(offset))
		if mask != math.MaxUint32 {
			code = append(code, unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: mask})
		}
		last := len(values) - 1
		for i, v := range values[:last] {
			code = append(code, branch(unix.BPF_JEQ, v, last-i, 0))
		}
		code = append(code, branch(unix.BPF_JEQ, values[last], 0, fails))
	}
	offset := offsetArgs + 8*c.arg
	half(offset+4, uint32(c.mask>>32), 0)
	half(offset, uint32(c.mask), c.values...)
	return code
}

const goTo = unix.BPF_JMP | unix.BPF_JA

func load(offset int) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: uint32(offset)}
}

func ret(answer uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: answer}
}

// branch compares with k and skips yes or no instructions.
func branch(comparison uint16, k uint32, yes, no int) unix.SockFilter {
	if max(yes, no) > math.MaxUint8 {
		panic(fmt.Sprintf("seccomp filter jumps over %d instructions, more than 255: there are too many spans", max(yes, no)))
	}
	return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_K | comparison, Jt: uint8(yes), Jf: uint8(no), K: k}
}

// Encode returns a program as the bytes that the kernel reads.
func Encode(program []unix.SockFilter) []byte {
	b := make([]byte, 0, 8*len(program))
	for _, i := range program {
		b = binary.NativeEndian.AppendUint16(b, i.Code)
		b = append(b, i.Jt, i.Jf)
		b = binary.NativeEndian.AppendUint32(b, i.K)
	}
	return b
}
