# SPDX-License-Identifier: Apache-2.0
# Variables that are none of the command's are in the output. Those that other factors set are left out.
# Cause: environment
# Factor: environment
# Needs: env
env -u PWD -u TZ -u LANG -u LC_ALL | LC_ALL=C sort > out
