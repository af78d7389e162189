# SPDX-License-Identifier: Apache-2.0
# Random numbers with a fixed seed.
# Needs: python3
/usr/bin/python3 -c 'import random; random.seed(7); print([random.randrange(100) for _ in range(5)])' > out
