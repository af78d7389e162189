# SPDX-License-Identifier: Apache-2.0
# The header of the compressed file keeps the time of what was compressed.
# Cause: timestamp
# Factor: time
# Needs: gzip
echo text > text
gzip -k text
mv text.gz out
