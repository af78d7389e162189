// SPDX-License-Identifier: Apache-2.0

package reapi_test

// storageRules are the rules 16 to 35.
var storageRules = []rule{
	{16, "cas", "malformed digests are refused by every method", anything, nil},
	{17, "cas", "a known hash with another size is another digest", anything, nil},
	{18, "cas", "the empty blob is there", anything, nil},
	{19, "cas", "the digest function is inferred from the length", anything, nil},
	{20, "cas", "equal hashes of two functions are two blobs", anything, nil},
	{21, "cas", "instance names of any number of segments, none reserved", anything, nil},
	{22, "cas", "a blob of one instance is not in another", anything, nil},
	{23, "cas", "exactly the absent blobs are found missing", anything, nil},
	{24, "cas", "what was found present stays", aServer, nil},
	{25, "cas", "each blob of a batch has its own status", anything, nil},
	{26, "cas", "a batch stores no blob with another digest", anything, nil},
	{27, "cas", "a batch over the limit is refused", anything, nil},
	{28, "cas", "a full store is told for each blob of a batch", aServer, nil},
	{29, "cas", "batches may be compressed", zstdBatches, nil},
	{30, "cas", "the same blob twice in a batch", anything, nil},
	{31, "cas", "each blob that is read in a batch has its own status", anything, nil},
	{32, "cas", "reading more than a batch holds is refused", anything, nil},
	{33, "cas", "replies are compressed only as is acceptable", anything, nil},
	{34, "cas", "trees are sent whole, in pages, without what is absent", anything, nil},
	{35, "cas", "a tree of 100,000 directories is sent", anything, nil},
}
