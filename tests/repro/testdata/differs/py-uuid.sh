# SPDX-License-Identifier: Apache-2.0
# The output contains a random UUID.
# Cause: random
# Factor: random
# Needs: python3
/usr/bin/python3 -c 'import uuid; print("id =", uuid.uuid4())' > out
