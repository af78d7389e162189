// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
)

// A file is what the directory says of a key.
type file struct {
	key  key
	size int64
	used time.Time
}

// scan fills the index from the directory, the order of use from the files' times. A blob whose file
// has not its size is removed: it is what a loss of power leaves.
func (c *Cache) scan() error {
	var found []file
	err := c.walk(func(path string, f file, ok bool) error {
		if !ok {
			return nil // not ours: neither counted nor touched
		}
		if f.key.kind != result && f.size != f.key.digest.Size() {
			return os.Remove(path)
		}
		found = append(found, f)
		return nil
	})
	if err != nil {
		return err
	}
	slices.SortFunc(found, func(a, b file) int {
		return cmp.Or(a.used.Compare(b.used), cmp.Compare(a.key.digest.Hash(), b.key.digest.Hash()))
	})
	for _, f := range found {
		c.index.load(f.key, charge(f.size), f.used)
	}
	return nil
}

// walk calls visit for each file and each symbolic link under instances. Ok is false if it is not at
// the place of any key.
func (c *Cache) walk(visit func(path string, f file, ok bool) error) error {
	root := filepath.Join(c.dir, "instances")
	names := map[string]string{} // one copy of each instance's name, not one per file
	return filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		k, ok := parseKey(filepath.ToSlash(rel))
		if !ok || !entry.Type().IsRegular() {
			return visit(path, file{}, false)
		}
		if _, seen := names[k.instance]; !seen {
			names[k.instance] = strings.Clone(k.instance)
		}
		k.instance = names[k.instance]
		fi, err := entry.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		return visit(path, file{k, fi.Size(), lastUse(fi)}, true)
	})
}

// parseKey is the inverse of what Cache.path appends to instances.
func parseKey(rel string) (key, bool) {
	part := strings.Split(rel, "/")
	if len(part) != 5 || !strings.HasPrefix(part[0], "@") {
		return key{}, false
	}
	k := slices.Index(kinds[:], part[1])
	f := slices.IndexFunc(cas.Functions(), func(f cas.Function) bool { return f.String() == part[2] })
	hash, size, _ := strings.Cut(part[4], "-")
	n, err := strconv.ParseInt(size, 10, 64)
	if k < 0 || f < 0 || err != nil || strconv.FormatInt(n, 10) != size || !strings.HasPrefix(hash, part[3]) ||
		len(part[3]) != 2 {
		return key{}, false
	}
	// A substring would keep the whole path alive for as long as the entry lives.
	d, err := cas.NewDigest(cas.Functions()[f], strings.Clone(hash), n)
	return key{part[0], kind(k), d}, err == nil
}

// Check reads the whole store and returns every way in which it is not as it should be: a file that is
// not what its name says, an entry without a file, a file without an entry, a wrong sum of bytes,
// something left in tmp. It changes nothing, and expects that nothing else is under way.
func (c *Cache) Check(ctx context.Context) error {
	end, err := c.begin()
	if err != nil {
		return err
	}
	defer end()
	var wrong []error
	report := func(format string, args ...any) { wrong = append(wrong, fmt.Errorf(format, args...)) }
	have := c.index.snapshot()
	var sum int64
	err = c.walk(func(path string, f file, ok bool) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		if !ok {
			report("%s: not a file of the store", path)
			return nil
		}
		n, indexed := have[f.key]
		delete(have, f.key)
		if !indexed {
			report("%s: not in the index", path)
		} else if n != charge(f.size) {
			report("%s: %d bytes, counted as %d", path, f.size, n)
		}
		sum += charge(f.size)
		if err := checkFile(ctx, path, f.key); err != nil {
			report("%s: %w", path, err)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("check store %s: %w", c.dir, err)
	}
	for k := range have {
		report("%s: in the index and not on disk", c.path(k))
	}
	if s := c.Stats(); s.Bytes != sum {
		report("files count as %d bytes, the index says %d", sum, s.Bytes)
	} else if s.Bytes > s.MaxBytes {
		report("%d bytes are above the budget of %d", s.Bytes, s.MaxBytes)
	}
	unfinished, err := os.ReadDir(filepath.Join(c.dir, "tmp"))
	if err != nil {
		report("%w", err)
	}
	for _, f := range unfinished {
		report("%s: unfinished", filepath.Join(c.dir, "tmp", f.Name()))
	}
	if len(wrong) > 0 {
		return fmt.Errorf("store %s: %w", c.dir, errors.Join(wrong...))
	}
	return nil
}

// readQuietly returns the content of a file without that counting as a use.
func readQuietly(path string) ([]byte, error) {
	f, err := openQuietly(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(f)
}

// checkFile returns how the content of a file is not what its key says.
func checkFile(ctx context.Context, path string, k key) error {
	if k.kind == result {
		b, err := readQuietly(path)
		if err != nil {
			return err
		}
		if _, ok := decodeResult(b); !ok {
			return errors.New("not an action result")
		}
		return nil
	}
	return readWhole(ctx, path, k.digest)
}

// readWhole reads a file to its end and returns cas.ErrCorrupt if its content is not d.
func readWhole(ctx context.Context, path string, d cas.Digest) error {
	f, err := openQuietly(path)
	if err != nil {
		return err
	}
	defer f.Close()
	buf := buffers.Get().(*[128 << 10]byte)
	defer buffers.Put(buf)
	for r := cas.Verify(d, f); ; {
		if err := ctx.Err(); err != nil {
			return err
		}
		if _, err := r.Read(buf[:]); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}
