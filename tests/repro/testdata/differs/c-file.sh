# SPDX-License-Identifier: Apache-2.0
# The source is compiled by its absolute path, which __FILE__ repeats.
# Cause: path
# Factor: path
# Needs: gcc
cat > main.c <<'E'
const char *where(void) { return __FILE__; }
E
gcc -c "$PWD/main.c" -o out
