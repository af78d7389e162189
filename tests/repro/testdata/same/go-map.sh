# SPDX-License-Identifier: Apache-2.0
# The sorted keys of a map.
# Needs: go
./programs/mapsorted > out
