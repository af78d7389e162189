# SPDX-License-Identifier: Apache-2.0
# An object for link-time optimization has sections with random names, and contains the directory compressed.
# Cause: random, path
# Factor: random, path
# Needs: gcc
echo 'int f(int x) { return x * 3; }' > f.c
gcc -O2 -flto -c f.c -o out
