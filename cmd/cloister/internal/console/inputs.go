// SPDX-License-Identifier: Apache-2.0

package console

import (
	"cmp"
	"fmt"
	"net/url"
	"strconv"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/blobview"
)

// inputsData is the data of /a/DIGEST/inputs.
type inputsData struct {
	Action   string           `json:"action"`
	Instance string           `json:"instance"`
	Root     cas.Digest       `json:"root"`
	Path     string           `json:"path"`
	Query    string           `json:"query,omitempty"`
	Complete bool             `json:"complete"` // Entries are all
	Entries  []blobview.Entry `json:"entries"`
	Total    blobview.Sum     `json:"total"`
	Next     int              `json:"next,omitempty"` // number of the entry after Entries
	Map      []blobview.Rect  `json:"-"`
	Audited  bool             `json:"audited"` // it is known which inputs the run read
}

// Link returns the URL of a directory of the tree.
func (d *inputsData) Link(path string, from int) string {
	u := url.URL{Path: link("/a/", d.Action, "") + "/inputs"}
	q := url.Values{"instance": {d.Instance}}
	if path != "" {
		q.Set("path", path)
	}
	if from > 0 {
		q.Set("from", strconv.Itoa(from))
	}
	u.RawQuery = q.Encode()
	return u.String()
}

// File returns the URL of an entry: a directory of the tree, or a blob.
func (d *inputsData) File(e blobview.Entry) string {
	if e.Kind == blobview.Directory {
		return d.Link(e.Path, 0)
	}
	return blobLink(e.Digest, d.Instance, "")
}

// Show returns a path for people.
func (*inputsData) Show(path string) string { return blobview.Visible(path) }

// A crumb is a directory above the shown one.
type crumb struct{ Name, Path string }

// Crumbs lists the directories from the root to the shown one.
func (d *inputsData) Crumbs() []crumb {
	all := []crumb{{"input root", ""}}
	at := ""
	for name := range strings.SplitSeq(d.Path, "/") {
		if name != "" {
			at = strings.TrimPrefix(at+"/"+name, "/")
			all = append(all, crumb{blobview.Visible(name), at})
		}
	}
	return all
}

func inputs(r *request) (any, error) {
	a, err := r.from.Action(r.Context(), digestName(r.PathValue("digest")))
	if err != nil {
		return nil, err
	}
	store, err := r.from.Open(r.Context())
	if err != nil {
		return nil, err
	}
	defer store.Close()
	d := &inputsData{
		Action: a.Digest.String(), Instance: r.from.Instance, Path: strings.Trim(r.FormValue("path"), "/"), Query: r.FormValue("q"), Complete: true,
	}
	var action repb.Action
	if err = cas.ReadProto(r.Context(), store, a.Digest, &action); err == nil {
		d.Root, err = cas.FromProto(a.Digest.Function(), action.InputRootDigest)
	}
	if err != nil {
		return nil, fmt.Errorf("instance %q: action %s: %w", d.Instance, a.Digest, err)
	}
	run, err := latestRun(r, store, a.Digest)
	if err != nil {
		return nil, err
	}
	unread := run.unread(r.Context(), store)
	d.Audited = unread != nil
	err = blobview.WithInputs(r.Context(), store, d.Root, unread, func(in *blobview.Inputs) error { return d.fill(in, r) })
	if err != nil {
		return nil, fmt.Errorf("instance %q: inputs of action %s: %w", d.Instance, a.Digest, err)
	}
	return d, nil
}

// fill adds what the request selects.
func (d *inputsData) fill(in *blobview.Inputs, r *request) (err error) {
	if d.Query != "" {
		d.Entries, d.Complete, err = in.Search(d.Query)
		return err
	}
	if d.Entries, err = in.Listing(d.Path); err != nil {
		return err
	}
	d.Total = blobview.Total(d.Entries)
	d.Map = in.Treemap(d.Entries)
	first := min(r.number("from", 0, len(d.Entries)), len(d.Entries))
	d.Entries = d.Entries[first:]
	if len(d.Entries) > blobview.MaxRows {
		d.Entries, d.Next, d.Complete = d.Entries[:blobview.MaxRows], first+blobview.MaxRows, false
	}
	return nil
}

// MapClass returns the class of a rectangle of the treemap.
func (d *inputsData) MapClass(e blobview.Entry) string {
	class := map[string]string{"": "s1", "read": "s3", "unread": "sbad"}[e.Read]
	return cmp.Or(class, "s4") // partly unread
}
