// SPDX-License-Identifier: Apache-2.0

package access

import "time"

// SetPatience sets how long whoever is not known may take to send a message.
func (r *Rules) SetPatience(d time.Duration) { r.patience = d }
