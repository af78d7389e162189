# SPDX-License-Identifier: Apache-2.0
# A Python set of strings is in random order.
# Cause: hash seed
# Factor: random
# Needs: python3
cat > main.py <<'E'
print("\n".join({"alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"}))
E
/usr/bin/python3 main.py > out
