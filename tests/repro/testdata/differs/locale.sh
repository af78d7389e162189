# SPDX-License-Identifier: Apache-2.0
# The output names the character set of the locale.
# Cause: locale
# Factor: locale
# Needs: locale
echo "charset=$(locale charmap)" > out
