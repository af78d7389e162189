// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"bytes"
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// readOnlyVar holds the directory in which TestReadOnlyChild makes file systems read-only.
const readOnlyVar = "CLOISTER_DISK_TEST_READ_ONLY"

// TestReadOnlyFileSystem: the store reports once that its file system has become read-only, and once that it has
// recovered.
func TestReadOnlyFileSystem(t *testing.T) { runInNamespace(t, "TestReadOnlyChild", readOnlyVar) }

func TestReadOnlyChild(t *testing.T) {
	dir := inNamespace(t, readOnlyVar)
	for _, test := range []struct {
		name   string
		notice func(*testing.T, *disk.Cache) error
	}{
		{"by asking", func(_ *testing.T, c *disk.Cache) error { return c.CheckWritable() }},
		{"by writing", func(t *testing.T, c *disk.Cache) error {
			b, d := castest.Blob(7, large)
			return store(t, c, "").Put(t.Context(), d, bytes.NewReader(b))
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var log bytes.Buffer
				config := disk.Config{Dir: filepath.Join(dir, test.name), Log: slog.New(slog.NewTextHandler(&log, nil))}
				c, s := twoSegments(t, config)
				putSize(t, s, 1, large)
				must.Succeed(t, c.CheckWritable())
				must.Succeed(t, syscall.Mount(config.Dir, config.Dir, "", syscall.MS_BIND, ""))
				const readOnly = syscall.MS_BIND | syscall.MS_REMOUNT | syscall.MS_RDONLY
				must.Succeed(t, syscall.Mount("", config.Dir, "", readOnly, ""))
				for range 3 {
					err := test.notice(t, c)
					if !errors.Is(err, cas.ErrUnwritable) || !errors.Is(err, syscall.EROFS) || !strings.Contains(err.Error(), config.Dir) {
						t.Errorf("got %v, want ErrUnwritable and EROFS, naming the store", err)
					}
					time.Sleep(2 * time.Second)
				}
				read(t, s, 1, large)
				read(t, s, 1, 500)
				must.Succeed(t, syscall.Unmount(config.Dir, 0))
				expect.Error(t, c.CheckWritable(), nil, "after it became writable")
				putSize(t, s, 2, large)
				read(t, s, 2, large)
				if text := log.String(); strings.Count(text, "cannot be written") != 1 || strings.Count(text, "can be written again") != 1 {
					t.Errorf("want each change logged once, got %s", text)
				}
				closeStore(t, c)
			})
		})
	}
}
