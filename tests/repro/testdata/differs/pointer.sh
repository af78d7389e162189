# SPDX-License-Identifier: Apache-2.0
# The output contains the address of a function.
# Cause: address
# Factor: aslr
# Needs: gcc
cat > main.c <<'E'
#include <stdio.h>
int main(void) { printf("main is at %p\n", (void *)main); return 0; }
E
gcc -fPIE -pie main.c -o main
./main > out
