// SPDX-License-Identifier: Apache-2.0

package access

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cloister-build/cloister/cas"
)

// A Caller describes an entry of a callers file.
type Caller struct {
	Name       string
	Credential string   // its kind, such as "certificate"
	Rights     []string // with instances unless they are all: "read", "execute in main, team/*"
}

// Callers describes the callers, in the order of the file.
func (r *Rules) Callers() []Caller {
	var all []Caller
	for _, c := range r.callers {
		all = append(all, c.describe())
	}
	return all
}

func (c *caller) describe() Caller {
	d := Caller{Name: c.name}
	switch {
	case c.anonymous:
		d.Credential = "anonymous"
	case c.tokens != nil:
		d.Credential = "token"
	case c.certificate != nil:
		d.Credential = "certificate"
	case c.jwt != nil:
		d.Credential = "jwt"
	}
	for i, name := range rightNames {
		if patterns, ok := c.rights[1<<i]; ok {
			d.Rights = append(d.Rights, name+inInstances(patterns))
		}
	}
	return d
}

// inInstances returns "" for all instances, or " in" and the patterns.
func inInstances(patterns []pattern) string {
	if slices.Contains(patterns, "*") {
		return ""
	}
	var texts []string
	for _, p := range patterns {
		if text := strconv.QuoteToASCII(string(p)); p == "" || text != `"`+string(p)+`"` || strings.ContainsAny(string(p), ", ") {
			texts = append(texts, text)
		} else {
			texts = append(texts, string(p))
		}
	}
	return " in " + strings.Join(texts, ", ")
}

// May reports whether the named caller has the named right in instance, and why. It fails if there is no such caller or
// right, or if the name of the instance is invalid.
func (r *Rules) May(name, right, instance string) (yes bool, why string, err error) {
	i := slices.IndexFunc(r.callers, func(c *caller) bool { return c.name == name })
	bit, known := parseRight(right)
	switch {
	case i < 0:
		return false, "", fmt.Errorf("no caller is named %+.64q", name)
	case !known:
		return false, "", fmt.Errorf("unknown right %+.64q: write one of %s", right, strings.Join(rightNames, ", "))
	}
	if err := cas.CheckInstanceName(instance); err != nil {
		return false, "", err
	}
	c := r.callers[i]
	patterns, ok := c.rights[bit]
	switch {
	case !ok:
		return false, fmt.Sprintf("caller %s does not have the right %s", c.name, right), nil
	case bit == rightWork && c.may(bit, instance) && !c.may(bit, instance+"/"):
		return false, fmt.Sprintf("caller %s has the right work%s; a worker also takes actions of instances below its own, "+
			"and needs the right in all of them", c.name, inInstances(patterns)), nil
	case !c.may(bit, instance):
		return false, fmt.Sprintf("caller %s has the right %s only%s", c.name, right, inInstances(patterns)), nil
	}
	return true, fmt.Sprintf("caller %s has the right %s%s", c.name, right, inInstances(patterns)), nil
}
