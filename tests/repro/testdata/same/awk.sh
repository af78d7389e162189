# SPDX-License-Identifier: Apache-2.0
# A sum.
# Needs: awk
seq 1000 | awk '{ n += $1 } END { print n }' > out
