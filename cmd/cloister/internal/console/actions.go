// SPDX-License-Identifier: Apache-2.0

package console

import (
	"net/http"
	"net/url"
	"regexp"
	"strings"

	"github.com/cloister-build/cloister/cmd/cloister/internal/actions"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
)

// listData is the data of /actions.
type listData struct {
	Target     string              `json:"target,omitempty"`
	Mnemonic   string              `json:"mnemonic,omitempty"`
	Invocation string              `json:"invocation,omitempty"`
	Failed     bool                `json:"failed,omitempty"`
	Rows       []actions.Execution `json:"executions"`
	Older      string              `json:"older,omitempty"` // URL of the next page
}

// rows returns the newest executions that a list selects.
func (r *request) rows(list *actions.List) ([]actions.Execution, error) {
	list.From, list.All = *r.from, true
	rows := []actions.Execution{}
	err := list.Each(r.Context(), func(row actions.Execution) (bool, error) {
		rows = append(rows, row)
		return true, nil
	})
	return rows, err
}

func listActions(r *request) (any, error) {
	q := r.URL.Query()
	d := &listData{Target: q.Get("target"), Mnemonic: q.Get("mnemonic"), Invocation: q.Get("invocation"), Failed: q.Get("failed") != ""}
	list := &actions.List{
		Target: d.Target, Mnemonic: d.Mnemonic, Invocation: d.Invocation, Failed: d.Failed,
		Limit: r.number("limit", 100, 1000), Before: uint64(r.number("before", 0, 1<<62)),
	}
	var err error
	if d.Rows, err = r.rows(list); err != nil {
		return nil, err
	}
	if len(d.Rows) == list.Limit {
		if last := d.Rows[len(d.Rows)-1].Number; last > 1 {
			q.Set("before", uitoa(last))
			d.Older = "/actions?" + q.Encode()
		}
	}
	return d, nil
}

// uuids matches the id of a build as Bazel makes it, or its beginning.
var uuids = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f-]{0,27}$`)

// search leads to the page of a target, a digest or a build.
func search(r *request) (any, error) {
	text := strings.TrimSpace(r.FormValue("q"))
	to := "/actions"
	switch {
	case uuids.MatchString(text):
		to = "/i/" + text
	case client.CheckNames(digestName(text)) == nil && !client.Target.MatchString(text):
		to = "/a/" + url.PathEscape(strings.Replace(text, "/", "-", 1))
	case client.Target.MatchString(text), strings.ContainsAny(text, "/:@"):
		to += "?" + url.Values{"target": {text}}.Encode()
	case text != "":
		to += "?" + url.Values{"mnemonic": {text}}.Encode()
	}
	return http.RedirectHandler(to, http.StatusSeeOther), nil
}
