# SPDX-License-Identifier: Apache-2.0
# A given date.
# Needs: gcc
cat > main.c <<'E'
const char built[] = "built on " __DATE__ " at " __TIME__;
E
SOURCE_DATE_EPOCH=1000000000 gcc -c main.c -o out
