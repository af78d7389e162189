# SPDX-License-Identifier: Apache-2.0
# The output contains the host name.
# Cause: hostname
# Factor: hostname
# Needs: uname
echo "built on $(uname -n)" > out
