// SPDX-License-Identifier: Apache-2.0

package storedir

import (
	"errors"
	"os"
	"path/filepath"
)

// WriteFile replaces a small file, so that it is there as a whole after a crash or a loss of power, or as it was before.
// Of one path there is one call at a time.
func WriteFile(path, content string) error {
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(content)
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Rename(path+".new", path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
