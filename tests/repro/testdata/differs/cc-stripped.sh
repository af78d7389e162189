# SPDX-License-Identifier: Apache-2.0
# Debug information names the directory, and is stripped: what is left of it is the build id, which was made of it.
# Cause: path
# Factor: path
# Needs: gcc
echo 'int main(void) { return 0; }' > m.c
gcc -g -Wl,--build-id=sha1 m.c -o out
strip out
