# SPDX-License-Identifier: Apache-2.0
# A compressed file without name and time.
# Needs: gzip
echo text > text
gzip -n -c text > out
