# SPDX-License-Identifier: Apache-2.0
# Objects built in parallel and linked in order.
# Needs: make
for n in a b c d; do echo "int $n(void) { return 0; }" > $n.c; done
cat > Makefile <<'E'
out: a.o b.o c.o d.o
	ar rcD out a.o b.o c.o d.o
E
make -s -j4 out
