// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
)

// What a comparison may cost. What it compares was made by actions, and may be made to cost much.
const (
	maxDifferences = 100
	maxAlike       = 10       // of those with the same cause next to each other
	maxDepth       = 8        // of things inside of things
	maxNames       = 16       // of Where
	headSize       = 1 << 10  // by which a format is told
	maxUnpacked    = 64 << 20 // bytes of one thing
	maxLive        = 256 << 20
	maxWork        = 1 << 30 // bytes unpacked in one comparison
	maxRatio       = 500     // of unpacked to packed, beyond the first MiB
	maxWords       = 4 << 20 // bytes looked at word by word
)

// errEnough says that there are as many differences as are told of; errTooMuch that a thing is not looked into.
var (
	errEnough  = errors.New("there are enough differences")
	errTooMuch = errors.New("unpacking it takes too much")
)

// A format is a kind of thing that can be compared in the words of that kind.
type format struct {
	name string
	// is reports whether a thing that begins with head, of at most headSize bytes, and is called name is of the format.
	is func(head []byte, name string) bool
	// compare adds the differences of a and b to c, none if it has no words for them. If it fails, with any error
	// but those that c's methods returned, what it added is dropped, and the next format is tried.
	compare func(c *comparison, a, b *io.SectionReader) error
}

// formats are tried in this order, and the first that finds a difference is the last.
func formats() []format {
	return []format{
		{"ar", isAr, compareAr},
		{"tar", isTar, compareTar},
		{"cpio", isCpio, compareCpio},
		{"jar", isJar, compareZip},
		{"zip", isZip, compareZip},
		{"gzip", isGzip, compareGzip},
		packedFormat("zstd", "\x28\xb5\x2f\xfd", unpackZstd),
		packedFormat("bzip2", "BZh", unpackBzip2),
		{"elf", isELF, compareELF},
		{"pe", isPE, comparePE},
		{"macho", isMachO, compareMachO},
		{"go object", isGoObject, compareGoObject},
		{"gcov", isGcov, compareGcov},
		{"class", isClass, compareClass},
		{"pyc", isPyc, comparePyc},
		{"png", isPNG, comparePNG},
		{"pdf", isPDF, comparePDF},
		{"json", isJSON, compareJSON},
		{"text", isTextFile, compareText},
	}
}

// A comparison is that of two things. Formats get one, and use it to say what differs and to compare what is inside.
type comparison struct {
	ctx   context.Context
	known Known
	// attributor is that of known; who looks at words by it takes them from the budget.
	attributor *attributor
	budget     *budget
	found      *findings
	where      []string
	depth      int
	// format is the name of the format of the two things, "" if it is none.
	format string
}

// A budget is what one comparison with all that is inside may yet cost.
type budget struct {
	live, work, words int64
}

// Blobs compares what a and b hold, and returns their differences, the most telling first in each thing; nil if they are equal. name
// is that of the thing, a path as a rule, and helps to tell its format. There are at most maxDifferences, and one more that says so
// if there would be more. What they hold may be hostile: memory, time and depth are bounded, and what is damaged or
// beyond the bounds is compared as bytes. It fails if a or b cannot be read, or with ctx.
func Blobs(ctx context.Context, name string, a, b *io.SectionReader, k Known) ([]Difference, error) {
	c := newComparison(ctx, k)
	if err := c.descend(name, a, b); err != nil && !errors.Is(err, errEnough) {
		return nil, err
	}
	return c.found.all(), nil
}

func newComparison(ctx context.Context, k Known) *comparison {
	if k.A == nil || k.B == nil {
		k.A, k.B = &Facts{}, &Facts{} // one side's facts explain no difference
	}
	return &comparison{
		ctx: ctx, known: k, attributor: newAttributor(k), found: &findings{},
		budget: &budget{live: maxLive, work: maxWork, words: maxWords},
	}
}

// within returns a comparison of what is called name inside of what c compares.
func (c *comparison) within(name string) *comparison {
	in := *c
	in.where = append(slices.Clip(c.where), printable(name, MaxText))
	in.depth++
	return &in
}

// descend compares two things that are called name inside of what c compares. A format returns its errors as they are.
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
	in := c.within(name)
	headA, errA := head(a)
	headB, errB := head(b)
	if err := errors.Join(errA, errB); err != nil {
		return err
	}
	for _, f := range formats() {
		isA, isB := f.is(headA, name), f.is(headB, name)
		if isA && isB && in.depth <= maxDepth && len(in.where) <= maxNames {
			if done, err := in.try(&f, a, b); done {
				return err
			}
		}
	}
	return in.plain(a, b, at)
}

// try compares a and b by f, and reports whether that was it.
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

// compare is f.compare, in which a defect that a hostile thing finds, of ours or of a library's, is an error.
func (c *comparison) compare(f *format, a, b *io.SectionReader) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%s: panic: %v", f.name, p)
		}
	}()
	return f.compare(c, fromStart(a), fromStart(b))
}

// differ adds a difference of the things themselves, or of what the names in below lie in. a and b are what each has; they need not be
// printable, and the beginning that they share is left out where they are long. offset is as in Difference.
func (c *comparison) differ(what, a, b string, offset int64, cause Cause, below ...string) {
	c.found.add(c.difference(what, a, b, offset, cause, below))
}

// follows adds a difference that only follows from others in the same thing or around it, as a checksum does: it is
// told after them.
func (c *comparison) follows(what, a, b string, offset int64, cause Cause, below ...string) {
	c.found.addAfter(c.difference(what, a, b, offset, cause, below))
}

func (c *comparison) difference(what, a, b string, offset int64, cause Cause, below []string) Difference {
	where := slices.Clip(c.where)
	for _, name := range below {
		where = append(where, printable(name, MaxText))
	}
	a, b = excerpts(a, b)
	return Difference{Where: where, What: printable(what, MaxText), A: a, B: b, Offset: offset, Cause: cause, Format: c.format, Fix: FixFor(cause, c.format)}
}

// takeWords takes the words of some texts from the budget, and reports whether there were enough.
func (c *comparison) takeWords(texts ...string) bool {
	for _, s := range texts {
		c.budget.words -= int64(min(len(s), maxLine))
	}
	return c.budget.words >= 0
}

// unpack reads r to its end into memory, as what was packed in so many bytes. release is called when it is no longer
// looked at. What goes beyond the bounds is errTooMuch.
func (c *comparison) unpack(r io.Reader, packed int64) (s *io.SectionReader, release func(), err error) {
	most := min(maxUnpacked, 1<<20+maxRatio*packed, c.budget.live, c.budget.work)
	data, err := io.ReadAll(io.LimitReader(reading{c.ctx, r}, most+1))
	n := int64(len(data))
	c.budget.work -= min(n, c.budget.work)
	if err != nil {
		return nil, nil, err
	}
	if n > most {
		return nil, nil, errTooMuch
	}
	c.budget.live -= n
	return section(data), func() { c.budget.live += n }, nil
}

// descendPacked compares what is packed in a and b, in so many bytes each, as descend does.
func (c *comparison) descendPacked(name string, a io.Reader, packedA int64, b io.Reader, packedB int64) error {
	sa, release, err := c.unpack(a, packedA)
	if err != nil {
		return err
	}
	defer release()
	sb, release, err := c.unpack(b, packedB)
	if err != nil {
		return err
	}
	defer release()
	return c.descend(name, sa, sb)
}

// firstDifference returns the offset of the first byte in which a and b differ, -1 if there is none.
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

// readAt reads len(p) bytes at off, or those up to the end, which is no error.
func readAt(s *io.SectionReader, p []byte, off int64) (int, error) {
	n, err := s.ReadAt(p[:max(0, min(int64(len(p)), s.Size()-off))], off)
	if err == io.EOF && n == int(max(0, min(int64(len(p)), s.Size()-off))) {
		err = nil
	}
	return n, err
}

func window(s *io.SectionReader, off int64, n int) ([]byte, error) {
	p := make([]byte, n)
	n, err := readAt(s, p, off)
	return p[:n], err
}

func head(s *io.SectionReader) ([]byte, error) { return window(s, 0, headSize) }

// fromStart returns a reader of the same bytes, at their beginning.
func fromStart(s *io.SectionReader) *io.SectionReader { return io.NewSectionReader(s, 0, s.Size()) }

func section(data []byte) *io.SectionReader {
	return io.NewSectionReader(bytes.NewReader(data), 0, int64(len(data)))
}

// reading is r until ctx ends.
type reading struct {
	ctx context.Context
	r   io.Reader
}

func (r reading) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(p)
}
