// SPDX-License-Identifier: Apache-2.0

package gate

import (
	"cmp"
	"encoding/xml"
	"regexp"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/sandbox/printable"
)

// sensitive matches the names of variables whose values are secrets in most CI systems.
var sensitive = regexp.MustCompile(`(?i)token|secret|passw|passphrase|credential|private|api_?key|access_?key|oauth|` +
	`authorization|cookie|signature|webhook|connection_?string|(^|_)(auth|creds?|jwt|key|keys|pass|pat|dsn)($|_)|` +
	`sshpass|_pwd($|_)`)

// userInfo matches the user name and the password in a URL. Many forges take a token as the user name.
var userInfo = regexp.MustCompile(`://([^/\s:@]*)(?::([^/\s@]*))?@`)

// minToken is the length of the shortest token in a user name. Most shorter user names are no secret.
const minToken = 16

// minSecret is the length of the shortest secret. A shorter value is part of too many words.
const minSecret = 6

const removed = "[removed]"

// secrets returns a replacer that removes the values of sensitive variables from text, in every notation of the
// evidence.
func secrets(environ []string) *strings.Replacer {
	var values []string
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		if sensitive.MatchString(name) && name != "GOPRIVATE" { // a list of public names
			values = append(values, value)
			values = append(values, strings.Split(value, "\n")...) // of a key, whose lines a program may print alone
		}
		for _, m := range userInfo.FindAllStringSubmatch(value, -1) {
			if values = append(values, m[2]); len(m[1]) >= minToken {
				values = append(values, m[1])
			}
		}
	}
	var needles []string
	for _, v := range values {
		v = strings.TrimSpace(v)
		if len(v) < minSecret {
			continue
		}
		quoted, _ := encode(v) // never fails for a string
		var escaped strings.Builder
		_ = xml.EscapeText(&escaped, []byte(v)) // never fails for a builder
		text := strings.TrimSuffix(string(quoted), "\n")
		needles = append(needles, v, text[1:len(text)-1], escaped.String(), printable.Text(v))
	}
	slices.SortFunc(needles, func(a, b string) int { return cmp.Or(cmp.Compare(len(b), len(a)), cmp.Compare(a, b)) })
	var pairs []string
	for _, n := range slices.Compact(needles) {
		pairs = append(pairs, n, removed)
	}
	return strings.NewReplacer(pairs...)
}
