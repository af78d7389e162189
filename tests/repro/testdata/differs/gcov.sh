# SPDX-License-Identifier: Apache-2.0
# A gcov notes file contains a stamp, which is the time, and the directory.
# Cause: timestamp, path
# Factor: time, path
# Needs: gcc
echo 'int f(void) { return 0; }' > f.c
gcc --coverage -c f.c
mkdir out
cp f.gcno out
