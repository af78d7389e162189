# SPDX-License-Identifier: Apache-2.0
# A sorted set.
# Needs: python3
/usr/bin/python3 -c 'print("\n".join(sorted({"alpha", "beta", "gamma", "delta"})))' > out
