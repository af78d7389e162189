# SPDX-License-Identifier: Apache-2.0
# The output contains the path of the working directory.
# Cause: path
# Factor: path
# Needs: sh
echo "prefix=$PWD" > out
