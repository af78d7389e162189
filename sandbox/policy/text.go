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

// Text returns the policy in canonical form, from which Parse returns the same policy. Profiles are sorted and
// complete, with built-in values as comments.
func (p *Policy) Text() string {
	w := &textWriter{}
	w.line(0, "version: 1")
	w.line(0, "profiles:")
	for _, name := range slices.Sorted(maps.Keys(p.all())) {
		w.profile(name, p.all()[name])
	}
	if len(p.rules) > 0 {
		w.line(0, "rules:")
	}
	for _, u := range p.rules {
		w.rule(u)
	}
	var unenforced []string
	for _, q := range quantities {
		if slices.Contains(p.allowUnenforced, q.limit) {
			unenforced = append(unenforced, q.key)
		}
	}
	if len(unenforced) > 0 {
		w.line(0, "allow_unenforced: [%s]", strings.Join(unenforced, ", "))
	}
	w.images(p.images)
	w.sandboxes(p.sandboxes)
	if len(p.defaults) > 0 {
		w.line(0, "default_properties:")
	}
	for _, instance := range slices.Sorted(maps.Keys(p.defaults)) {
		w.line(1, "%q:", instance)
		for _, d := range p.defaults[instance] {
			w.line(2, "%q: %q", d.Name, d.Value)
		}
		if len(p.defaults[instance]) == 0 {
			w.line(2, "{}")
		}
	}
	return w.String()
}

// A textWriter writes the canonical text.
type textWriter struct{ strings.Builder }

func (w *textWriter) line(depth int, format string, args ...any) {
	fmt.Fprintf(w, strings.Repeat("  ", depth)+format+"\n", args...)
}

// field writes a setting of a profile, as a comment if it is built in.
func (w *textWriter) field(at, key, value string) {
	if at == "" {
		key = "# " + key
	}
	w.line(2, "%s: %s", key, value)
}

func (w *textWriter) profile(name string, o *profile) {
	if name != o.base {
		w.line(1, "%s:", plain(name))
		w.line(2, "inherits: %s", o.base)
	} else if o.isDefault() {
		w.line(1, "%s: {}", name)
	} else {
		w.line(1, "%s:", name)
	}
	for i, q := range quantities {
		if o.amounts[i].v == sandbox.Unlimited {
			continue
		}
		value := q.format(o.amounts[i].v)
		if q.limit == sandbox.LimitProcesses && o.amounts[i].at == "" {
			value = fmt.Sprintf("%d for each processor, at least %s", o.processesPerCPU, value)
		}
		w.field(o.amounts[i].at, q.key, value)
	}
	if o.maxTimeout.at != "" {
		w.field(o.maxTimeout.at, "max_timeout", formatDuration(o.maxTimeout.v))
	}
	w.field(o.loopback.at, "loopback", fmt.Sprint(o.loopback.v))
	w.field(o.listen.at, "listen", fmt.Sprint(o.listen.v))
	w.field(o.audit.at, "audit", o.audit.v.String())
	if o.superuser.at != "" {
		w.field(o.superuser.at, "superuser", fmt.Sprint(o.superuser.v))
	}
	if o.persistent.at != "" {
		w.field(o.persistent.at, "persistent_workers", fmt.Sprint(o.persistent.v))
	}
	switch {
	case o.remote.at != "" && o.remoteCache.at != "":
		w.line(2, "remote_apis: {allow: %t, cache: %t}", o.remote.v, o.remoteCache.v)
	case o.remote.at != "":
		w.line(2, "remote_apis: {allow: %t}", o.remote.v)
	case o.remoteCache.at != "":
		w.line(2, "remote_apis: {cache: %t}", o.remoteCache.v)
	}
	if o.onViolation.set() {
		w.line(2, "on_violation: %s", o.onViolation.text())
	}
	allow := fmt.Sprintf("[%s]", strings.Join(quoted(o.allow.v), ", "))
	switch {
	case o.allow.at != "" && o.cache.at != "":
		w.line(2, "network: {allow: %s, cache: %t}", allow, o.cache.v)
	case o.allow.at != "":
		w.line(2, "network: {allow: %s}", allow)
	case o.cache.at != "":
		w.line(2, "network: {cache: %t}", o.cache.v)
	}
}

func (w *textWriter) rule(u *rule) {
	w.line(1, "- name: %s", plain(u.name))
	w.condition(&u.when)
	if u.profile != "" {
		w.line(2, "profile: %s", plain(u.profile))
	}
	var bounds []string
	for i, q := range quantities {
		if m := u.max[i]; m.at != "" {
			bounds = append(bounds, q.key+": "+q.format(m.v))
		}
	}
	if len(bounds) > 0 {
		w.line(2, "max: {%s}", strings.Join(bounds, ", "))
	}
}

// condition writes the conditions of a rule, unless it matches everything.
func (w *textWriter) condition(when *condition) {
	if !when.always() {
		w.line(2, "when:")
	}
	if when.target != nil {
		w.line(3, "target: %q", when.target)
	}
	if when.mnemonic != nil {
		w.line(3, "mnemonic: %q", *when.mnemonic)
	}
	if when.instance != nil {
		w.line(3, "instance: %q", *when.instance)
	}
	if len(when.properties) > 0 {
		w.line(3, "property:")
	}
	for _, p := range when.properties {
		w.line(4, "%q: %q", p.Name, p.Value)
	}
}

// isDefault reports whether the file sets nothing in the profile.
func (o *profile) isDefault() bool {
	return !o.onViolation.set() && !slices.ContainsFunc(o.amounts[:], func(s setting[int64]) bool { return s.at != "" }) &&
		o.maxTimeout.at+o.loopback.at+o.listen.at+o.audit.at+o.allow.at+o.cache.at+o.superuser.at+o.persistent.at+o.remote.at+o.remoteCache.at == ""
}

// plain returns a name as YAML. Of the well-formed names, only null needs quotes.
func plain(name string) string {
	if strings.EqualFold(name, "null") {
		return strconv.Quote(name)
	}
	return name
}

func quoted[T any](es []T) []string {
	var s []string
	for _, e := range es {
		s = append(s, strconv.Quote(fmt.Sprint(e)))
	}
	return s
}
