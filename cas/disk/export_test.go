// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"os"
	"time"
)

// LastUse is lastUse for tests of another package.
var LastUse = lastUse

// SetLastUse makes the file at path one that was used last at the time used.
func SetLastUse(path string, used time.Time) error {
	access, modification := stampTimes(used)
	return os.Chtimes(path, access, modification)
}
