// SPDX-License-Identifier: Apache-2.0

package diskctl

import "time"

func init() { openTimeout, verifyPatience = time.Second, time.Second }
