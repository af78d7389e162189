# SPDX-License-Identifier: Apache-2.0
# The linker draws a random build ID.
# Cause: build id
# Factor: random
# Needs: gcc
echo 'int main(void) { return 0; }' > main.c
gcc -Wl,--build-id=uuid main.c -o out
