// SPDX-License-Identifier: Apache-2.0

package reapi_test

// actionCacheRules are the rules 62 to 69.
var actionCacheRules = []rule{
	{62, "ac", "an incomplete hit is a miss", updates, nil},
	{63, "ac", "a hit lets all its blobs stay", aServer, nil},
	{64, "ac", "inlining is a hint, and has limits", updates, nil},
	{65, "ac", "refused updates are as advertised", anything, nil},
	{66, "ac", "results with bad digests or paths are refused", updates, nil},
	{67, "ac", "a result with absent outputs is no hit", updates, nil},
	{68, "ac", "a failure is never a hit of Execute", updates, nil},
	{69, "ac", "results of different keys are apart", updates, nil},
}
