# SPDX-License-Identifier: Apache-2.0
# A hash table with a fixed seed.
# Needs: python3
PYTHONHASHSEED=0 /usr/bin/python3 -c 'print("\n".join({"alpha", "beta", "gamma", "delta"}))' > out
