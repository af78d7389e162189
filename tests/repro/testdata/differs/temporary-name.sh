# SPDX-License-Identifier: Apache-2.0
# The output contains the name of a temporary file.
# Cause: path
# Factor: random
# Needs: python3
/usr/bin/python3 -c 'import tempfile; print("made by way of", tempfile.mkstemp()[1])' > out
