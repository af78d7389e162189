// SPDX-License-Identifier: Apache-2.0

package manifest

import "strconv"

// quote returns s between double quotes as printable ASCII, with the escapes of Go. It asks no table of Unicode, which a
// newer one would answer otherwise.
func quote(s string) string { return strconv.QuoteToASCII(s) }

// unquote reads what quote writes from the beginning of s, and returns what is behind it.
func unquote(s string) (text, rest string, err error) {
	q, err := strconv.QuotedPrefix(s)
	if err != nil {
		return "", "", err
	}
	text, err = strconv.Unquote(q)
	return text, s[len(q):], err
}
