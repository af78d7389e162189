#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Verifies manifests by docs/manifest.md, without Cloister: verify.sh DIR, where DIR/stable-hashes has a line for each.
cd "$1" && while read -r want file; do
	stable=$(sed '/^volatile$/,$d' "$file" | sha256sum) && [ "${stable%% *}" = "$want" ] || { echo "$file: stable hash"; exit 1; }
	for part in spec configuration toolchain; do
		sum=$(sed -n "/^volatile$/q; s/^$part //p" "$file" | sha256sum)
		[ "$(sed -n "s/^$part-hash //p" "$file")" = "${sum%% *}" ] || { echo "$file: $part-hash"; exit 1; }
	done
	for list in output 'toolchain program'; do
		sed -n "/^volatile$/q; s/^$list //p" "$file" | LC_ALL=C sort -cu || { echo "$file: order of ${list}s"; exit 1; }
	done
done <stable-hashes
