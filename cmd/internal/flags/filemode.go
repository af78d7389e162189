// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"errors"
	"fmt"
	"io/fs"
	"strconv"
)

// FileMode is a flag of permission bits, in octal.
type FileMode fs.FileMode

// Set implements pflag.Value.
func (m *FileMode) Set(s string) error {
	n, err := strconv.ParseUint(s, 8, 32)
	if err != nil || n > 0o777 {
		return errors.New("write 0600 or 0660")
	}
	*m = FileMode(n)
	return nil
}

// String implements pflag.Value.
func (m *FileMode) String() string { return fmt.Sprintf("%04o", uint32(*m)) }

// Type implements pflag.Value.
func (*FileMode) Type() string { return "octal" }
