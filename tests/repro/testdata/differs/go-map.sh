# SPDX-License-Identifier: Apache-2.0
# A map is iterated in an order that is random.
# Cause: hash seed
# Factor: random
# Chance: threads that the runtime begins take from the same numbers; how many depends on processors and on luck
# Needs: go
./programs/mapiter 2> out
