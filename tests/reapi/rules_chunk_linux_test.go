// SPDX-License-Identifier: Apache-2.0

package reapi_test

// chunkRules are the rules 57 to 61.
var chunkRules = []rule{
	{57, "chunk", "a blob is told as its chunks", splitting, nil},
	{58, "chunk", "mappings come in small messages with the function first", splitting, nil},
	{59, "chunk", "the first message of a mapping decides", splicing, nil},
	{60, "chunk", "a mapping is verified before it exists", splicing, nil},
	{61, "chunk", "FastCDC and SHA256TREE are those of the published vectors", anything, nil},
}
