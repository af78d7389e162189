# SPDX-License-Identifier: Apache-2.0
# An object for link-time optimization with a seed and a constant directory.
# Needs: gcc
echo 'int f(void) { return 0; }' > f.c
PWD=/proc/self/cwd gcc -O2 -flto -frandom-seed=f.c -c f.c -o out
