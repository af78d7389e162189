// SPDX-License-Identifier: Apache-2.0

package bazelrun

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Blobs returns the names, relative to dir, of all blobs in the store at dir. It reads each and returns
// an error if there is one whose bytes are not those that its name states.
func Blobs(dir string) (map[string]bool, error) {
	names := map[string]bool{}
	var damaged []string
	for _, kind := range []string{"blobs", "execs"} {
		err := walk(dir, kind, func(path, name string) error {
			digest, err := digestOf(path)
			if err != nil {
				return err
			}
			if digest != filepath.Base(path) {
				damaged = append(damaged, fmt.Sprintf("%s has the digest %s", name, digest))
			}
			names[name] = true
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	if len(damaged) > 0 {
		return nil, fmt.Errorf("damaged: %s", strings.Join(damaged, "; "))
	}
	return names, nil
}

// Results returns the number of action results in the store at dir, which may be in use.
func Results(dir string) (int, error) {
	n := 0
	err := walk(dir, "results", func(string, string) error {
		n++
		return nil
	})
	return n, err
}

// walk calls visit with the path, and with the name relative to dir, of each file of one kind.
func walk(dir, kind string, visit func(path, name string) error) error {
	roots, err := filepath.Glob(filepath.Join(dir, "instances", "*", kind))
	if err != nil {
		return err
	}
	for _, root := range roots {
		err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			return visit(path, strings.TrimPrefix(path, dir+string(filepath.Separator)))
		})
		if err != nil {
			return fmt.Errorf("walk store: %w", err)
		}
	}
	return nil
}

// digestOf returns the SHA-256 and size of a file in the form of a store's file name, HASH-SIZE.
func digestOf(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	size, err := io.Copy(h, f)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s-%d", hex.EncodeToString(h.Sum(nil)), size), nil
}
