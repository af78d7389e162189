# SPDX-License-Identifier: Apache-2.0
# Notes for gcov with a seed, and a directory that has one name everywhere.
# Needs: gcc
echo 'int f(void) { return 0; }' > f.c
PWD=/proc/self/cwd gcc --coverage -frandom-seed=f.c -c f.c
mkdir out
cp f.gcno out
