# SPDX-License-Identifier: Apache-2.0
# A random identifier is in the output.
# Cause: random
# Factor: random
# Needs: python3
/usr/bin/python3 -c 'import uuid; print("id =", uuid.uuid4())' > out
