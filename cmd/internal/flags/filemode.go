// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"errors"
	"fmt"
	"io/fs"
	"strconv"
)

// A fileMode is a flag of permission bits, in octal.
type FileMode fs.FileMode

func (m *FileMode) String() string { return fmt.Sprintf("%04o", uint32(*m)) }

func (*FileMode) Type() string { return "octal" }

func (m *FileMode) Set(s string) error {
	n, err := strconv.ParseUint(s, 8, 32)
	if err != nil || n > 0o777 {
		return errors.New("write it as 0600 or 0660")
	}
	*m = FileMode(n)
	return nil
}
