// SPDX-License-Identifier: Apache-2.0

package execserver

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/cloister-build/cloister/worker/queue"
)

// A filter selects the operations that match all its terms.
type filter []term

// A term is KEY=VALUE.
type term struct {
	key, value string
}

// keys are the valid keys of terms.
var keys = []string{"action", "invocation", "mnemonic", "stage", "target"}

// parseFilter parses the filter of a ListOperationsRequest: terms KEY=VALUE separated by spaces or AND, all of which
// must match. The keys are
//
//	action       HASH or HASH/SIZE of the action, or as messages print it
//	invocation   tool_invocation_id
//	mnemonic     action_mnemonic
//	stage        CACHE_CHECK, QUEUED, EXECUTING or COMPLETED
//	target       target_id
//
// Values match as in history.Match, except that an empty value matches only an empty text. A value with spaces is
// quoted as in Go.
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
			value, _ = strconv.Unquote(quoted) // QuotedPrefix has validated it
			rest = after[len(quoted):]
		} else if value, rest, _ = strings.Cut(after, " "); strings.Contains(value, `"`) {
			return nil, fmt.Errorf("the value of %s has an unbalanced quote: %.100q", key, after)
		}
		t := term{key: key, value: value}
		if _, known := repb.ExecutionStage_Value_value[value]; key == "stage" && !known {
			return nil, fmt.Errorf("unknown stage %.100q", value)
		}
		f = append(f, t)
	}
	return f, nil
}

// matches reports whether f selects o in state s.
func (f filter) matches(o *queue.Operation, s queue.State) bool {
	i := o.Info()
	for _, t := range f {
		var ok bool
		switch t.key {
		case "action":
			hash := i.Action.Hash()
			ok = t.matches(hash) || t.matches(hash+"/"+strconv.FormatInt(i.Action.Size(), 10)) || t.matches(i.Action.String())
		case "invocation":
			ok = t.matches(i.Invocation)
		case "mnemonic":
			ok = t.matches(i.Mnemonic)
		case "stage":
			ok = t.matches(s.Stage.String())
		case "target":
			ok = t.matches(i.Target)
		}
		if !ok {
			return false
		}
	}
	return true
}

func (t term) matches(text string) bool {
	return text == t.value || t.value != "" && history.Match(t.value, text)
}
