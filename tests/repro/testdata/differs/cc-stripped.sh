# SPDX-License-Identifier: Apache-2.0
# The program is stripped, but its build ID is computed from debug information that names the directory.
# Cause: path
# Factor: path
# Needs: gcc
echo 'int main(void) { return 0; }' > m.c
gcc -g -Wl,--build-id=sha1 m.c -o out
strip out
