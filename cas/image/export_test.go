// SPDX-License-Identifier: Apache-2.0

package image

import "time"

// SetMaxQuery sets the maximum time of a query, and returns a function that restores it.
func SetMaxQuery(d time.Duration) (restore func()) {
	old := maxQuery
	maxQuery = d
	return func() { maxQuery = old }
}
