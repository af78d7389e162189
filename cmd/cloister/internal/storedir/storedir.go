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

	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
)

// Audit returns the directory of the log of a store.
func Audit(store string) string { return filepath.Join(store, "audit") }

// Lease returns what disk.Config says of a lease: 0 is none.
func Lease(s flags.Duration) time.Duration {
	if s == 0 {
		return -1
	}
	return time.Duration(s)
}

// Path returns the directory that --dir names, or the default.
func Path(flag string) (string, error) {
	if flag == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return "", exit.New(exit.Environment, fmt.Errorf("there is no cache directory for this user (%w): state --dir", err))
		}
		flag = filepath.Join(cache, "cloister")
	}
	return filepath.Abs(flag)
}

// Journal returns the file in which a store remembers what is still to be written to its upstream.
func Journal(dir string) string { return filepath.Join(dir, "upstream.journal") }

// Pending returns how many blobs and results stand in the journal of a store that nobody writes.
func Pending(dir string) (int, error) {
	data, err := os.ReadFile(Journal(dir))
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
