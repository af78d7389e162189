// SPDX-License-Identifier: Apache-2.0

package console

import (
	"compress/gzip"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"slices"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/actions"
	"github.com/cloister-build/cloister/cmd/cloister/internal/blobview"
	"github.com/cloister-build/cloister/cmd/cloister/internal/buildevents"
	"github.com/cloister-build/cloister/cmd/internal/exit"
)

// buildEvents returns the summary of the events of a build, or nil if the server has none.
func buildEvents(r *request, id string) (*buildevents.Build, error) {
	b, err := actions.ReadBuild(r.Context(), r.from, id)
	if e, ok := errors.AsType[*exit.Error](err); ok && (e.Code == exit.Absent || e.Code == exit.No) {
		return nil, nil
	}
	return b, err
}

// following reports whether more may become known about the build: it is running, or its client may connect again.
func (d *invocationData) following() bool {
	return d.Build != nil && (d.Build.Publishing || d.Build.Status == buildevents.Interrupted)
}

// invocationFeed is the feed of /i/ID.
func (h *Handler) invocationFeed(r *request) (data any, changed <-chan struct{}, over bool, err error) {
	if h.cfg.Changed == nil {
		return nil, nil, false, errNoPage
	}
	id, err := r.from.Invocation(r.Context(), r.PathValue("id"))
	if err != nil {
		return nil, nil, false, err
	}
	// The channel must not miss what happens after the data was read. A build without events does not change.
	changed, unknown := h.cfg.Changed(id)
	d, err := readInvocation(r, id)
	if err != nil {
		return nil, nil, false, err
	}
	return d, changed, unknown != nil || !d.following(), nil
}

// maxParts limits the results of tests, and the files of targets and tests, that a page shows of a build.
const maxParts = 5000

// shorten removes what a page does not show of a large build, and reports whether there is any. What failed comes
// first.
func shorten(b *buildevents.Build) (less bool) {
	fine := func(t *buildevents.Target) bool {
		return (t.Outcome == "built" || t.Outcome == "") && (t.Test == nil || t.Test.Status == "passed")
	}
	all := slices.DeleteFunc(slices.Clone(b.Targets), fine)
	all = append(all, slices.DeleteFunc(b.Targets, func(t *buildevents.Target) bool { return !fine(t) })...)
	b.Targets = all[:min(len(all), blobview.MaxRows)]
	less = len(b.Targets) < len(all)
	left := maxParts
	fit := func(n int) int {
		n, less = min(n, left), less || n > left
		left -= n
		return n
	}
	for _, t := range b.Targets {
		if t.Test != nil {
			t.Test.Results = t.Test.Results[:fit(len(t.Test.Results))]
			for i := range t.Test.Results {
				r := &t.Test.Results[i]
				r.Files = r.Files[:fit(len(r.Files))]
			}
		}
		t.Outputs = t.Outputs[:fit(len(t.Outputs))]
	}
	return less
}

// maxProfiles limits the profiles that are downloaded at once. Each can take hundreds of megabytes until it is written.
const maxProfiles = 4

var errProfiles = fmt.Errorf("%w: too many profiles are being downloaded: try again later", cas.ErrUnavailable)

// A profileFile is the profile of a build as a file for Perfetto.
type profileFile struct {
	*actions.Profile
	leave func() // makes room for another one
}

func buildProfile(r *request) (any, error) {
	select {
	case r.h.profiles <- struct{}{}:
	default:
		return nil, errProfiles
	}
	leave := func() { <-r.h.profiles }
	p, err := actions.ReadProfile(r.Context(), r.from, r.PathValue("id"))
	if err != nil {
		leave()
		return nil, err
	}
	return profileFile{p, leave}, nil
}

// ServeHTTP implements http.Handler. The file has no time limit, but each of its writes has.
func (f profileFile) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	defer f.leave()
	h := w.Header()
	h.Set("Content-Security-Policy", "default-src 'none'; sandbox")
	h.Set("Content-Type", "application/gzip")
	h.Set("Content-Disposition", mime.FormatMediaType("attachment", map[string]string{"filename": f.ID + ".profile.gz"}))
	if r.Method == http.MethodHead {
		return
	}
	out := gzip.NewWriter(&patient{w, http.NewResponseController(w)})
	_, err := f.Write(r.Context(), out)
	if err == nil {
		err = out.Close()
	}
	if err != nil {
		panic(http.ErrAbortHandler) // the browser left, or must notice that the file is incomplete
	}
}

// A patient writer has a time limit for each write.
type patient struct {
	http.ResponseWriter
	control *http.ResponseController
}

// Write implements io.Writer.
func (p *patient) Write(b []byte) (int, error) {
	if err := p.control.SetWriteDeadline(time.Now().Add(writeTime)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return 0, err
	}
	return p.ResponseWriter.Write(b)
}
