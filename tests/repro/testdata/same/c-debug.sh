# SPDX-License-Identifier: Apache-2.0
# Debug information with the directory mapped away.
# Needs: gcc
cat > main.c <<'E'
int twice(int x) { return 2 * x; }
E
gcc -g -ffile-prefix-map="$PWD"=. -c main.c -o out
