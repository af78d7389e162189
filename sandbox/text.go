// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
)

// Text returns the canonical text of a valid Spec: one line for each thing that the run may see and use, in the order
// of the fields. Strings are quoted as in Go, with escapes for everything but printable ASCII. Sources and the
// workspace are absent: the same text means the same permission on every host.
func (s *Spec) Text() string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("cloister spec 1")
	for _, a := range s.Args {
		line("arg %+q", a)
	}
	line("dir %+q", s.Dir)
	for _, kv := range s.Env {
		line("env %+q", kv)
	}
	if s.Root != nil {
		line("root %+q", s.Root.Content)
	}
	if s.Superuser {
		line("superuser")
	}
	for _, in := range s.Inputs {
		line("input %+q %+q", in.Target, in.Content)
	}
	for _, o := range s.Outputs {
		line("output %+q", o.Target)
	}
	for _, l := range s.Lower {
		line("lower %+q %+q", l.Target, l.Content)
	}
	for _, t := range s.Temp {
		line("temp %+q %d", t.Target, t.Bytes)
	}
	for _, in := range s.Sockets {
		line("socket %+q %+q", in.Target, in.Content)
	}
	if s.Network.Loopback {
		line("loopback")
	}
	if s.Network.Listen {
		line("listen")
	}
	for _, e := range s.Network.Allow {
		line("allow %s", e)
	}
	for _, l := range AllLimits {
		// A text without the lines of later limits is that of earlier versions.
		if v := s.Limits.Of(l); v != Unlimited || l != LimitMilliCPUs && l != LimitDiskRate {
			line("limit %+q %d", l, v)
		}
	}
	if s.Audit != AuditViolations {
		line("audit %s", s.Audit)
	}
	for _, k := range s.Kill {
		line("kill %s", k)
	}
	for _, c := range AllConditions {
		if v := s.Conditions.Of(c); v != "" {
			line("condition %+q %s", c, v)
		}
	}
	if s.Accept != "" {
		line("accept %+q", s.Accept)
	}
	line("timeout %d", s.Timeout)
	line("grace %d", s.Grace)
	return b.String()
}

// Hash returns the SHA-256 of Text in hexadecimal.
func (s *Spec) Hash() string {
	sum := sha256.Sum256([]byte(s.Text()))
	return hex.EncodeToString(sum[:])
}
