# SPDX-License-Identifier: Apache-2.0
# A gcov notes file with a seed and a constant directory.
# Needs: gcc
echo 'int f(void) { return 0; }' > f.c
PWD=/proc/self/cwd gcc --coverage -frandom-seed=f.c -c f.c
mkdir out
cp f.gcno out
