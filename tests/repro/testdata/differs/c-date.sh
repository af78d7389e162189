# The preprocessor puts the date and the time into the program.
# Cause: __DATE__
# Factor: time
# Needs: gcc
cat > main.c <<'E'
const char built[] = "built on " __DATE__ " at " __TIME__;
E
gcc -c main.c -o out
