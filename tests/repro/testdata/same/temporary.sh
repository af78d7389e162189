# A temporary file that leaves no trace.
# Needs: mktemp
t=$(mktemp)
echo text > "$t"
cat "$t" > out
