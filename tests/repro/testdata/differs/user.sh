# SPDX-License-Identifier: Apache-2.0
# The output contains the user name.
# Cause: owner
# Factor: user
# Needs: id
echo "built by $(id -un)" > out
