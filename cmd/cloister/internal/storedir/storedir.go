// SPDX-License-Identifier: Apache-2.0

// Package storedir names the files in the directory of a store, and reads those that no other package owns.
package storedir

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas/durable"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
)

// Path returns the absolute path of a directory given with --dir, or of the default one.
func Path(flag string) (string, error) {
	if flag == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return "", exit.New(exit.Environment, fmt.Errorf("no cache directory for this user (%w): pass --dir", err))
		}
		flag = filepath.Join(cache, "cloister")
	}
	return filepath.Abs(flag)
}

// Audit returns the directory of the audit log.
func Audit(dir string) string { return filepath.Join(dir, "audit") }

// Journal returns the journal of writes that wait to be sent upstream.
func Journal(dir string) string { return filepath.Join(dir, "upstream.journal") }

// Lease converts a --lease flag for disk.Config, in which a negative lease means none.
func Lease(d flags.Duration) time.Duration {
	if d == 0 {
		return -1
	}
	return time.Duration(d)
}

// Pending returns the number of blobs and results in the journal. No process may hold the store.
func Pending(dir string) (int, error) {
	data, err := durable.ReadFile(Journal(dir))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return 0, err
	}
	pending := map[string]bool{}
	for line := range strings.Lines(string(data)) {
		switch verb, entry, _ := strings.Cut(line, " "); verb {
		case "add":
			pending[entry] = true
		case "done":
			delete(pending, entry)
		}
	}
	return len(pending), nil
}
