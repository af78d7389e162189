// SPDX-License-Identifier: Apache-2.0

package reapi_test

import "slices"

// executionRules are the rules 70 to 132.
var executionRules = slices.Concat(validationRules, operationRules, environmentRules, resultRules, serviceRules)
