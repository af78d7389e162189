// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/diskctl"
	"github.com/cloister-build/cloister/cmd/cloister/internal/storedir"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/sandbox"
)

// openStore opens the store and resolves c.Dir.
func openStore(c *Config, log *slog.Logger) (*disk.Cache, error) {
	dir, err := storedir.Path(c.Dir)
	if err != nil {
		return nil, err
	}
	c.Dir = dir
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, exit.New(exit.Environment, fmt.Errorf("--dir %s: %w", dir, err))
	}
	// Inputs are mounted by path, and mounts refuse symlinks.
	if c.Dir, err = filepath.EvalSymlinks(dir); err != nil {
		return nil, exit.New(exit.Environment, fmt.Errorf("--dir %s: %w", dir, err))
	}
	limit, err := c.maxSize.Of(c.Dir)
	if err != nil {
		return nil, exit.New(exit.Environment, err)
	}
	if size, err := flags.DiskBytes(c.Dir); err == nil && limit > size {
		log.Warn("--max-size is larger than the file system; writes will fail when that is full",
			"max-size", sandbox.Bytes(limit), "file system", sandbox.Bytes(size), "dir", c.Dir)
	}
	store, err := disk.Open(disk.Config{
		Dir: c.Dir, MaxBytes: limit, MaxFiles: c.maxFiles, Lease: storedir.Lease(c.lease), Sync: c.Sync, Log: log,
		Corrupt: func(instance string, d cas.Digest, where string) {
			log.Warn("damaged blob; it is absent until it is uploaded or produced again",
				"digest", d.String(), "instance", instance, "where", where, "kept", diskctl.Quarantine(c.Dir, d))
		},
	})
	if err != nil {
		return nil, exit.New(exit.Environment, err)
	}
	if s := store.Stats(); s.LogDamage > 0 || s.LogLost > 0 {
		log.Warn("damaged segment logs or unreadable directories; some blobs are absent until they are uploaded or produced again",
			"dir", c.Dir, "unreadable_or_missing_bytes", s.LogDamage, "records_without_bytes", s.LogLost)
	}
	return store, nil
}

// FullHint returns what the operator can do when the store has reached a limit.
func FullHint(l cas.Limit) string {
	switch l {
	case cas.LimitFiles:
		return "raise --max-files, lower --lease or remove unused blobs with cloister gc"
	case cas.LimitDisk:
		return "free space or inodes on the disk, or lower --max-size"
	default:
		return "raise --max-size or lower --lease"
	}
}
