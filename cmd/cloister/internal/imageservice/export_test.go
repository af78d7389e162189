// SPDX-License-Identifier: Apache-2.0

package imageservice

import "time"

func init() { progressInterval = 5 * time.Millisecond }
