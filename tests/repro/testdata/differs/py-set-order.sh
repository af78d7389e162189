# SPDX-License-Identifier: Apache-2.0
# A set of texts is in the order of a hash table, whose seed is random.
# Cause: hash seed
# Factor: random
# Needs: python3
cat > main.py <<'E'
print("\n".join({"alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"}))
E
/usr/bin/python3 main.py > out
