# SPDX-License-Identifier: Apache-2.0
# The linker makes the build id of random bytes.
# Cause: build id
# Factor: random
# Needs: gcc
echo 'int main(void) { return 0; }' > main.c
gcc -Wl,--build-id=uuid main.c -o out
