// SPDX-License-Identifier: Apache-2.0

package diskctl

import "time"

// The tests wait for what takes long on a slow machine.
func init() { openTimeout, verifyPatience = time.Minute, time.Minute }

// SetPatience sets the time that Open and Verify wait for others, and returns a function that restores it.
func SetPatience(d time.Duration) (restore func()) {
	open, verify := openTimeout, verifyPatience
	openTimeout, verifyPatience = d, d
	return func() { openTimeout, verifyPatience = open, verify }
}
