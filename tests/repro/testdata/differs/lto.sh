# SPDX-License-Identifier: Apache-2.0
# An object for the linker to compile has sections with random names, and the directory, compressed.
# Cause: random, path
# Factor: random, path
# Needs: gcc
echo 'int f(int x) { return x * 3; }' > f.c
gcc -O2 -flto -c f.c -o out
