# SPDX-License-Identifier: Apache-2.0
# A temporary file that leaves no trace.
# Needs: mktemp
t=$(mktemp)
echo text > "$t"
cat "$t" > out
