# The address of a variable is in the output.
# Cause: address
# Factor: aslr
# Needs: gcc
cat > main.c <<'E'
#include <stdio.h>
int main(void) { int x; printf("x is at %p\n", (void *)&x); return 0; }
E
gcc main.c -o main
./main > out
