# SPDX-License-Identifier: Apache-2.0
# The gzip header contains the time of the file.
# Cause: timestamp
# Factor: time
# Needs: gzip
echo text > text
gzip -k text
mv text.gz out
