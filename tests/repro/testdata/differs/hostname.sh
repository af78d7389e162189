# SPDX-License-Identifier: Apache-2.0
# The name of the host is in the output.
# Cause: hostname
# Factor: hostname
# Needs: uname
echo "built on $(uname -n)" > out
