# SPDX-License-Identifier: Apache-2.0
# The path of the working directory is in the output.
# Cause: path
# Factor: path
# Needs: sh
echo "prefix=$PWD" > out
