// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"path"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/blobview"
	"github.com/cloister-build/cloister/sandbox/printable"
)

// viewers are the pages about blobs, inputs, violations and comparisons.
func viewers() []page {
	return []page{
		{"/cas/{digest}", "", "blob.html", true, blob},
		{"/cas/{function}/{digest}", "", "blob.html", true, blob},
		{"/cas/{digest}/raw", "", "", false, rawBlob},
		{"/cas/{function}/{digest}/raw", "", "", false, rawBlob},
		{"/a/{digest}/inputs", "", "inputs.html", true, inputs},
		{"/a/{digest}/sandbox", "", "sandbox.html", false, violations},
		{"/a/{digest}/repro", "", "repro.html", false, checks},
		{"/a/{digest}/repro/report", "", "", true, checkReport},
		{"/diff", "diff", "diff.html", false, diff},
		{"/audit", "audit", "audit.html", false, auditLog},
	}
}

// digest returns the digest in the path of a request: [FUNCTION:]HASH-SIZE or FUNCTION/HASH-SIZE.
func (r *request) digest() (cas.Digest, error) {
	name := r.PathValue("digest")
	if f := r.PathValue("function"); f != "" {
		name = f + ":" + name
	}
	return cas.ParseDigest(digestName(name))
}

// blobData is the data of /cas/DIGEST.
type blobData struct {
	*blobview.Blob
	Instance string `json:"instance"`
	Name     string `json:"-"`
}

// Number returns the number of the line with an index.
func (*blobData) Number(index int) int { return index + 1 }

// Kinds lists the kinds that a reader may choose.
func (*blobData) Kinds() []string { return blobview.Kinds }

// Link returns the URL of a blob of a kind in the same instance.
func (d *blobData) Link(blob cas.Digest, kind string) string { return blobLink(blob, d.Instance, kind) }

// Raw returns the URL of the content.
func (d *blobData) Raw() string {
	u := url.URL{Path: link("/cas/", d.Digest.String(), "") + "/raw"}
	u.RawQuery = url.Values{"instance": {d.Instance}, "name": {d.Name}}.Encode()
	return u.String()
}

// blobLink returns the URL of a blob of a kind, "" for what it appears to be.
func blobLink(blob cas.Digest, instance, kind string) string {
	u := url.URL{Path: link("/cas/", blob.String(), "")}
	q := url.Values{}
	if instance != "" {
		q.Set("instance", instance)
	}
	if kind != "" {
		q.Set("as", kind)
	}
	u.RawQuery = q.Encode()
	return u.String()
}

func blob(r *request) (any, error) {
	d, err := r.digest()
	if err != nil {
		return nil, err
	}
	store, err := r.from.Open(r.Context())
	if err != nil {
		return nil, err
	}
	defer store.Close()
	b, err := blobview.Read(r.Context(), store, d, r.FormValue("as"))
	if err != nil {
		return nil, fmt.Errorf("instance %q: %w", r.from.Instance, err)
	}
	return &blobData{Blob: b, Instance: r.from.Instance, Name: r.FormValue("name")}, nil
}

// A download is the content of a blob. Browsers neither show it nor run anything in it.
type download struct {
	store interface {
		cas.Store
		io.Closer
	}
	blob cas.Digest
	name string
}

func rawBlob(r *request) (any, error) {
	d, err := r.digest()
	if err != nil {
		return nil, err
	}
	store, err := r.from.Open(r.Context())
	if err != nil {
		return nil, err
	}
	missing, err := store.Missing(r.Context(), []cas.Digest{d})
	if err == nil && len(missing) > 0 {
		err = fmt.Errorf("instance %q: blob %s: %w", r.from.Instance, d, cas.ErrNotFound)
	}
	if err != nil {
		store.Close()
		return nil, err
	}
	name := printable.Head(path.Base("/"+r.FormValue("name")), 200)
	if name == "/" {
		name = d.Hash()
	}
	return &download{store, d, name}, nil
}

// ServeHTTP implements http.Handler. A download has no time limit, but each of its writes has.
func (f *download) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	defer f.store.Close()
	h := w.Header()
	h.Set("Content-Security-Policy", "default-src 'none'; sandbox")
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Disposition", mime.FormatMediaType("attachment", map[string]string{"filename": f.name}))
	h.Set("ETag", `"`+f.blob.String()+`"`)
	in := &content{ctx: r.Context(), from: f, control: http.NewResponseController(w)}
	defer in.stop()
	http.ServeContent(w, r, "", time.Time{}, in)
}

// content is an io.ReadSeeker of a blob. It opens a stream at the offset of the first read after a Seek.
type content struct {
	ctx     context.Context
	from    *download
	control *http.ResponseController
	at      int64
	in      io.ReadCloser // nil until it is needed
}

func (c *content) stop() {
	if c.in != nil {
		c.in.Close()
		c.in = nil
	}
}

// Seek implements io.Seeker.
func (c *content) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += c.at
	case io.SeekEnd:
		offset += c.from.blob.Size()
	}
	if offset < 0 {
		return 0, errors.New("negative offset")
	}
	if offset != c.at {
		c.stop()
	}
	c.at = offset
	return offset, nil
}

// Read implements io.Reader.
func (c *content) Read(p []byte) (n int, err error) {
	if c.in == nil {
		if c.in, err = c.from.store.Open(c.ctx, c.from.blob, min(c.at, c.from.blob.Size())); err != nil {
			return 0, err
		}
	}
	if err := c.control.SetWriteDeadline(time.Now().Add(requestTime)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return 0, err
	}
	n, err = c.in.Read(p)
	c.at += int64(n)
	return n, err
}

// browserLink redirects a link to Buildbarn's browser to the page that shows the same.
func (h *Handler) browserLink(w http.ResponseWriter, r *http.Request) {
	l, ok, err := blobview.ParseLink(r.URL.Path)
	switch {
	case !ok:
		h.fail(w, r, errNoPage)
	case err != nil:
		h.fail(w, r, err)
	case l.Kind == blobview.Action:
		http.Redirect(w, r, link("/a/", l.Blob.String(), l.Instance), http.StatusFound)
	case l.Kind == "file":
		http.Redirect(w, r, blobLink(l.Blob, l.Instance, ""), http.StatusFound)
	default:
		http.Redirect(w, r, blobLink(l.Blob, l.Instance, l.Kind), http.StatusFound)
	}
}
