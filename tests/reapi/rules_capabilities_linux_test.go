// SPDX-License-Identifier: Apache-2.0

package reapi_test

// capabilityRules are the rules 1 to 15.
var capabilityRules = []rule{
	{1, "capabilities", "capabilities are told, of the cache and of execution", anything, nil},
	{2, "capabilities", "clients of API 2.0 and of 2.12 are served", anything, nil},
	{3, "capabilities", "every digest function served is listed", anything, nil},
	{4, "capabilities", "the one digest function of execution is in its list", execution, nil},
	{5, "capabilities", "exec_enabled tells the truth", anything, nil},
	{6, "capabilities", "update_enabled tells the truth", anything, nil},
	{7, "capabilities", "priorities are advertised, and those inside are accepted", anything, nil},
	{8, "capabilities", "the limit of a batch is exact", anything, nil},
	{9, "capabilities", "a message with a whole batch in it is received", anything, nil},
	{10, "capabilities", "the limit of a blob holds for every way to upload", anything, nil},
	{11, "capabilities", "compressors that are listed work, for streams and batches", anything, nil},
	{12, "capabilities", "absolute symlinks are as advertised", anything, nil},
	{13, "capabilities", "advertised splitting and splicing are implemented", anything, nil},
	{14, "capabilities", "chunking parameters are inside the ranges of the API", anything, nil},
	{15, "capabilities", "an instance that is none has one code everywhere", anything, nil},
}
