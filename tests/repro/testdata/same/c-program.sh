# SPDX-License-Identifier: Apache-2.0
# A linked program.
# Needs: gcc
cat > main.c <<'E'
#include <stdio.h>
int main(void) { puts("hello"); return 0; }
E
gcc -O2 main.c -o out
