// SPDX-License-Identifier: Apache-2.0

package execserver

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/worker/queue"
)

// A filter says which operations of a list are wanted: those that all its terms admit.
type filter []term

// A term is KEY=VALUE.
type term struct {
	key, value string
	prefix     bool // value is only how the text begins
}

// keys are what a term may speak of.
var keys = []string{"action", "invocation", "mnemonic", "stage", "target"}

// parseFilter reads the filter of a ListOperationsRequest: terms KEY=VALUE with spaces, or AND, between them, all of
// which must hold. The keys are
//
//	action       HASH or HASH/SIZE of the action, or as messages print it
//	invocation   tool_invocation_id
//	mnemonic     action_mnemonic
//	stage        CACHE_CHECK, QUEUED, EXECUTING or COMPLETED
//	target       target_id
//
// A value is compared as a whole or, if it ends in an asterisk, as the beginning of the text. One with spaces stands in
// double quotes, as in Go.
func parseFilter(text string) (filter, error) {
	var f filter
	for rest := strings.TrimSpace(text); rest != ""; rest = strings.TrimSpace(rest) {
		if after, ok := strings.CutPrefix(rest, "AND "); ok && len(f) > 0 {
			rest = after
			continue
		}
		key, after, ok := strings.Cut(rest, "=")
		if !ok || !slices.Contains(keys, key) {
			return nil, fmt.Errorf("%.100q is not KEY=VALUE with one of the keys %s", rest, strings.Join(keys, ", "))
		}
		var value string
		if quoted, err := strconv.QuotedPrefix(after); err == nil {
			value, _ = strconv.Unquote(quoted) // which QuotedPrefix has seen to be possible
			rest = after[len(quoted):]
		} else if value, rest, _ = strings.Cut(after, " "); strings.Contains(value, `"`) {
			return nil, fmt.Errorf("the value of %s has a quote that does not end, or does not begin: %.100q", key, after)
		}
		t := term{key: key, value: value}
		t.value, t.prefix = strings.CutSuffix(value, "*")
		if _, known := repb.ExecutionStage_Value_value[value]; key == "stage" && !known {
			return nil, fmt.Errorf("there is no stage %.100q", value)
		}
		f = append(f, t)
	}
	return f, nil
}

// admits reports whether o, in the state s, is wanted.
func (f filter) admits(o *queue.Operation, s queue.State) bool {
	i := o.Info()
	for _, t := range f {
		var ok bool
		switch t.key {
		case "action":
			hash := i.Action.Hash()
			ok = t.holds(hash) || t.holds(hash+"/"+strconv.FormatInt(i.Action.Size(), 10)) || t.holds(i.Action.String())
		case "invocation":
			ok = t.holds(i.Invocation)
		case "mnemonic":
			ok = t.holds(i.Mnemonic)
		case "stage":
			ok = t.holds(s.Stage.String())
		case "target":
			ok = t.holds(i.Target)
		}
		if !ok {
			return false
		}
	}
	return true
}

func (t term) holds(text string) bool {
	if t.prefix {
		return strings.HasPrefix(text, t.value)
	}
	return text == t.value
}
