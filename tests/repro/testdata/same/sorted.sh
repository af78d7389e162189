# SPDX-License-Identifier: Apache-2.0
# Lines sorted by bytes.
# Needs: sort
cat names/* | LC_ALL=C sort > out
