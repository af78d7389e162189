// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/cloister-build/cloister/sandbox/printable"
)

// Limits of one comparison, because its input may be hostile.
const (
	maxDifferences = 100
	maxAlike       = 10       // adjacent differences of one cause
	maxDepth       = 8        // nested files
	maxNames       = 16       // in Where
	headSize       = 1 << 10  // bytes by which a format is recognized
	maxUnpacked    = 64 << 20 // bytes of one file
	maxLive        = 256 << 20
	maxWork        = 1 << 30 // bytes unpacked in total
	maxRatio       = 500     // of unpacked to packed size, beyond the first MiB
	maxWords       = 4 << 20 // bytes split into words
)

var (
	// errEnough ends a comparison that has found maxDifferences.
	errEnough = errors.New("too many differences")
	// errTooMuch means that a file exceeds a limit.
	errTooMuch = errors.New("unpacking it takes too much")
)

// A comparison compares two files. Formats use it to report differences and to compare nested files.
type comparison struct {
	ctx   context.Context
	known Known
	// classifier finds causes by known. Callers take the words from the budget.
	classifier *classifier
	budget     *budget
	sums       *sums
	found      *findings
	where      []string
	depth      int
	// format is the name of the files' format, or "", and outer are those of the files that contain them.
	format string
	outer  []string
	// textsOnly means that numbers in the files show no cause.
	textsOnly bool
}

// A budget is what a comparison and everything nested in it may still cost.
type budget struct {
	live, work, words int64
}

// Blobs returns the differences of a and b, the most telling ones of each file first; nil if they are equal. name is
// usually a path and helps to recognize the format. It returns at most maxDifferences, and one more that says so if it
// left any out. The content may be hostile: memory, time and depth are limited, and files that are damaged or exceed a
// limit are compared as bytes. It fails only if a or b cannot be read or ctx ends.
func Blobs(ctx context.Context, name string, a, b *io.SectionReader, k Known) ([]Difference, error) {
	c := newComparison(ctx, k)
	if err := c.descend(name, a, b); err != nil && !errors.Is(err, errEnough) {
		return nil, err
	}
	return c.sums.name(c.found.all()), nil
}

func newComparison(ctx context.Context, k Known) *comparison {
	if k.A == nil || k.B == nil {
		k.A, k.B = &Facts{}, &Facts{} // the facts of one side explain no difference
	}
	return &comparison{
		ctx: ctx, known: k, classifier: newClassifier(k), found: &findings{}, sums: newSums(k),
		budget: &budget{live: maxLive, work: maxWork, words: maxWords},
	}
}

// within returns a comparison of nested files of a name.
func (c *comparison) within(name string) *comparison {
	in := *c
	in.where = append(slices.Clip(c.where), printable.Head(name, maxText))
	if in.depth++; c.format != "" {
		in.outer = append(slices.Clip(c.outer), c.format)
	}
	return &in
}

// descend compares nested files of a name. Formats must return its errors unchanged.
func (c *comparison) descend(name string, a, b *io.SectionReader) error {
	if err := c.ctx.Err(); err != nil {
		return err
	}
	if c.found.full() {
		return errEnough
	}
	at, err := firstDifference(a, b)
	if err != nil || at < 0 {
		return err
	}
	if err := c.sums.add(name, a, b); err != nil {
		return err
	}
	in := c.within(name)
	in.format = ""
	headA, errA := window(a, 0, headSize)
	headB, errB := window(b, 0, headSize)
	if err := errors.Join(errA, errB); err != nil {
		return err
	}
	for _, f := range formats() {
		if !f.is(headA, name) || !f.is(headB, name) || in.depth > maxDepth || len(in.where) > maxNames {
			continue
		}
		if f.compare == nil {
			in.format, in.textsOnly = f.name, in.textsOnly || f.textsOnly
			break
		}
		if done, err := in.try(&f, a, b); done {
			return err
		}
	}
	return in.plain(a, b, at)
}

// try compares a and b by f. It reports false if f found nothing or failed.
func (c *comparison) try(f *format, a, b *io.SectionReader) (done bool, err error) {
	in := *c
	in.format, in.found = f.name, &findings{}
	err = in.compare(f, a, b)
	switch {
	case c.ctx.Err() != nil:
		return true, c.ctx.Err()
	case err != nil && !errors.Is(err, errEnough):
		return false, nil
	case in.found.none():
		return false, nil
	}
	c.found.merge(in.found)
	if c.found.full() {
		return true, errEnough
	}
	return true, nil
}

// compare calls f.compare and turns a panic into an error: hostile input must not end the process, even if it triggers
// a bug.
func (c *comparison) compare(f *format, a, b *io.SectionReader) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%s: panic: %v", f.name, p)
		}
	}()
	return f.compare(c, fromStart(a), fromStart(b))
}

// differ adds a difference of the files, or of what the names in below lead to. a and b are the values of each side.
// They need not be printable, and long ones lose most of their common prefix. offset is Difference.Offset.
func (c *comparison) differ(what, a, b string, offset int64, cause Cause, below ...string) {
	c.found.add(c.difference(what, a, b, offset, cause, below))
}

// follows adds a difference that is a consequence of others, such as a checksum. It is reported after them.
func (c *comparison) follows(what, a, b string, cause Cause, below ...string) {
	c.found.addAfter(c.difference(what, a, b, -1, cause, below))
}

func (c *comparison) difference(what, a, b string, offset int64, cause Cause, below []string) Difference {
	where := slices.Clip(c.where)
	for _, name := range below {
		where = append(where, printable.Head(name, maxText))
	}
	a, b = excerpts(a, b)
	return Difference{
		Where: where, What: printable.Head(what, maxText), A: a, B: b, Offset: offset,
		Cause: cause, Format: c.format, Within: c.outer, Fix: FixFor(cause, c.format),
	}
}

// takeWords takes texts from the budget and reports whether it was sufficient.
func (c *comparison) takeWords(texts ...string) bool {
	for _, s := range texts {
		c.budget.words -= int64(min(len(s), maxLine))
	}
	return c.budget.words >= 0
}

// unpack reads all of r, which has packed bytes in compressed form, into memory. The caller calls release when it no
// longer uses the content. It fails with errTooMuch beyond the limits.
func (c *comparison) unpack(r io.Reader, packed int64) (data []byte, release func(), err error) {
	limit := min(maxUnpacked, 1<<20+maxRatio*packed, c.budget.live, c.budget.work)
	data, err = io.ReadAll(io.LimitReader(contextReader{c.ctx, r}, limit+1))
	n := int64(len(data))
	c.budget.work -= min(n, c.budget.work)
	if err != nil {
		return nil, nil, err
	}
	if n > limit {
		return nil, nil, errTooMuch
	}
	c.budget.live -= n
	return data, func() { c.budget.live += n }, nil
}

// withBytes calls see with the contents of a and b in memory, within the limits.
func (c *comparison) withBytes(a, b *io.SectionReader, see func(a, b []byte) error) error {
	dataA, release, err := c.unpack(a, a.Size())
	if err != nil {
		return err
	}
	defer release()
	dataB, release, err := c.unpack(b, b.Size())
	if err != nil {
		return err
	}
	defer release()
	return see(dataA, dataB)
}

// firstCause returns the first cause found, for its consequences.
func (c *comparison) firstCause() Cause {
	for _, d := range c.found.diffs {
		if d.Cause != Unknown {
			return d.Cause
		}
	}
	return Unknown
}

// identity adds a difference of an ID that a tool computes from the rest or draws at random. If there are other
// differences it is their consequence.
func (c *comparison) identity(what, a, b string, below ...string) {
	if c.found.none() {
		c.differ(what, a, b, -1, BuildID, below...)
		return
	}
	c.follows(what+", which "+followsRest, a, b, c.firstCause(), below...)
}

// firstDifference returns the offset of the first different byte, or -1.
func firstDifference(a, b *io.SectionReader) (int64, error) {
	const chunk = 64 << 10
	bufA, bufB := make([]byte, chunk), make([]byte, chunk)
	for off := int64(0); ; off += chunk {
		na, err := readAt(a, bufA, off)
		if err != nil {
			return 0, err
		}
		nb, err := readAt(b, bufB, off)
		if err != nil {
			return 0, err
		}
		if !bytes.Equal(bufA[:na], bufB[:nb]) {
			return off + int64(commonPrefix(bufA[:na], bufB[:nb])), nil
		}
		if na < chunk {
			return -1, nil
		}
	}
}

func commonPrefix[S ~[]byte | ~string](a, b S) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

// readAt reads len(p) bytes at off, or fewer at the end.
func readAt(s *io.SectionReader, p []byte, off int64) (int, error) {
	p = p[:max(0, min(int64(len(p)), s.Size()-off))]
	n, err := s.ReadAt(p, off)
	if err == io.EOF && n == len(p) {
		err = nil
	}
	return n, err
}

func window(s *io.SectionReader, off int64, n int) ([]byte, error) {
	p := make([]byte, n)
	n, err := readAt(s, p, off)
	return p[:n], err
}

// fromStart returns a reader of s at its beginning.
func fromStart(s *io.SectionReader) *io.SectionReader { return io.NewSectionReader(s, 0, s.Size()) }

func section(data []byte) *io.SectionReader {
	return io.NewSectionReader(bytes.NewReader(data), 0, int64(len(data)))
}

// A contextReader reads r until ctx ends.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (r contextReader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(p)
}
