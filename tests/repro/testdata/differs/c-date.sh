# SPDX-License-Identifier: Apache-2.0
# The preprocessor writes date and time into the program.
# Cause: __DATE__
# Factor: time
# Needs: gcc
cat > main.c <<'E'
const char built[] = "built on " __DATE__ " at " __TIME__;
E
TZ=UTC gcc -c main.c -o out
