// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
)

// Text returns the policy in canonical form, from which Parse returns the same policy. Profiles are sorted and complete,
// with built-in values as comments.
func (p *Policy) Text() string {
	var b strings.Builder
	line := func(depth int, format string, args ...any) {
		fmt.Fprintf(&b, strings.Repeat("  ", depth)+format+"\n", args...)
	}
	field := func(depth int, at, key, value string) {
		if at == "" {
			key = "# " + key
		}
		line(depth, "%s: %s", key, value)
	}
	line(0, "version: 1")
	line(0, "profiles:")
	for _, name := range slices.Sorted(maps.Keys(p.profiles)) {
		o := p.profiles[name]
		if name != o.base {
			line(1, "%s:", plain(name))
			line(2, "inherits: %s", o.base)
		} else if o.isDefault() {
			line(1, "%s: {}", name)
		} else {
			line(1, "%s:", name)
		}
		for i, q := range quantities {
			field(2, o.amounts[i].at, q.key, q.format(o.amounts[i].v))
		}
		if o.maxTimeout.at != "" {
			field(2, o.maxTimeout.at, "max_timeout", formatDuration(o.maxTimeout.v))
		}
		field(2, o.loopback.at, "loopback", fmt.Sprint(o.loopback.v))
		field(2, o.listen.at, "listen", fmt.Sprint(o.listen.v))
		field(2, o.audit.at, "audit", formatAudit(o.audit.v))
		allow := fmt.Sprintf("[%s]", strings.Join(quoted(o.allow.v), ", "))
		switch {
		case o.allow.at != "" && o.cache.at != "":
			line(2, "network: {allow: %s, cache: %t}", allow, o.cache.v)
		case o.allow.at != "":
			line(2, "network: {allow: %s}", allow)
		case o.cache.at != "":
			line(2, "network: {cache: %t}", o.cache.v)
		}
	}
	if len(p.rules) > 0 {
		line(0, "rules:")
	}
	for _, u := range p.rules {
		line(1, "- name: %s", plain(u.name))
		if !u.when.always() {
			line(2, "when:")
		}
		if u.when.target != nil {
			line(3, "target: %q", u.when.target)
		}
		if u.when.mnemonic != nil {
			line(3, "mnemonic: %q", *u.when.mnemonic)
		}
		if u.when.instance != nil {
			line(3, "instance: %q", *u.when.instance)
		}
		if len(u.when.properties) > 0 {
			line(3, "property:")
		}
		for _, p := range u.when.properties {
			line(4, "%q: %q", p.Name, p.Value)
		}
		if u.profile != "" {
			line(2, "profile: %s", plain(u.profile))
		}
		var max []string
		for i, q := range quantities {
			if m := u.max[i]; m.at != "" {
				max = append(max, q.key+": "+q.format(m.v))
			}
		}
		if len(max) > 0 {
			line(2, "max: {%s}", strings.Join(max, ", "))
		}
	}
	var unenforced []string
	for _, q := range quantities {
		if slices.Contains(p.allowUnenforced, q.limit) {
			unenforced = append(unenforced, q.key)
		}
	}
	if len(unenforced) > 0 {
		line(0, "allow_unenforced: [%s]", strings.Join(unenforced, ", "))
	}
	return b.String()
}

// isDefault reports whether the file sets nothing in the profile.
func (o *profile) isDefault() bool {
	return !slices.ContainsFunc(o.amounts[:], func(s setting[int64]) bool { return s.at != "" }) &&
		o.maxTimeout.at+o.loopback.at+o.listen.at+o.audit.at+o.allow.at+o.cache.at == ""
}

// plain returns a name as YAML. Of the well-formed names, only null needs quotes.
func plain(name string) string {
	if strings.EqualFold(name, "null") {
		return strconv.Quote(name)
	}
	return name
}

func quoted(es []sandbox.Endpoint) []string {
	var s []string
	for _, e := range es {
		s = append(s, fmt.Sprintf("%q", e))
	}
	return s
}
