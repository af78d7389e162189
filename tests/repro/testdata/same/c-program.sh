# SPDX-License-Identifier: Apache-2.0
# A program, linked.
# Needs: gcc
cat > main.c <<'E'
#include <stdio.h>
int main(void) { puts("hello"); return 0; }
E
gcc -O2 main.c -o out
