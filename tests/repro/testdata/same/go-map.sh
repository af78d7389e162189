# SPDX-License-Identifier: Apache-2.0
# The keys of a map, sorted.
# Needs: go
./programs/mapsorted > out
