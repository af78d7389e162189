# The name of a temporary file is in the output.
# Cause: random
# Factor: random
# Needs: mktemp
echo "made by way of $(mktemp)" > out
