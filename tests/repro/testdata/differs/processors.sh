# SPDX-License-Identifier: Apache-2.0
# The output contains the number of processors.
# Cause: cpu count
# Factor: cpus
# Needs: nproc
echo "jobs=$(nproc)" > out
