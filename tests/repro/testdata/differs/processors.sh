# SPDX-License-Identifier: Apache-2.0
# The number of processors is in the output.
# Cause: cpu count
# Factor: cpus
# Needs: nproc
echo "jobs=$(nproc)" > out
