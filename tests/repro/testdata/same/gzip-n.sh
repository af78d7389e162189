# SPDX-License-Identifier: Apache-2.0
# A gzip file without name and time.
# Needs: gzip
echo text > text
gzip -n -c text > out
