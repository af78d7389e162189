# SPDX-License-Identifier: Apache-2.0
# An ar archive in deterministic mode.
# Needs: ar
echo 'int f(void) { return 1; }' > f.c
gcc -c f.c
ar rcD out f.o
