# SPDX-License-Identifier: Apache-2.0
# The name of the user is in the output.
# Cause: owner
# Factor: user
# Needs: id
echo "built by $(id -un)" > out
