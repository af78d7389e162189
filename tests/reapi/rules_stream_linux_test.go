// SPDX-License-Identifier: Apache-2.0

package reapi_test

// streamRules are the rules 36 to 56.
var streamRules = []rule{
	{36, "stream", "names of uploads, with and without more behind them", anything, nil},
	{37, "stream", "sloppy upload names, and names that change", anything, nil},
	{38, "stream", "writes begin at 0 or where the server says", anything, nil},
	{39, "stream", "what ends without finish_write is not stored", anything, nil},
	{40, "stream", "a write says how much it committed", anything, nil},
	{41, "stream", "a blob that is present ends a write early and well", anything, nil},
	{42, "stream", "a write of other bytes is refused", anything, nil},
	{43, "stream", "compressed writes", zstdStreams, nil},
	{44, "stream", "compressed writes go on by compressed offsets", zstdStreams, nil},
	{45, "stream", "unknown compressors, many frames, garbage, nothing", zstdStreams, nil},
	{46, "stream", "the state of a write can be asked for", anything, nil},
	{47, "stream", "many writers of one blob", anything, nil},
	{48, "stream", "reads of absent blobs and from offsets", anything, nil},
	{49, "stream", "reads end at their limit", anything, nil},
	{50, "stream", "every blob can be read in every compressor", zstdStreams, nil},
	{51, "stream", "compressed reads count uncompressed bytes, without limits", zstdStreams, nil},
	{52, "stream", "reads come in pieces, and may be broken off", anything, nil},
	{53, "stream", "a read is whole or an error, whatever is evicted", aServer, nil},
	{54, "stream", "the header with the resource name must be true", anything, nil},
	{55, "stream", "a blob of 5 GiB", anything, nil},
	{56, "stream", "a crash leaves no part of a blob", aServer, nil},
}
