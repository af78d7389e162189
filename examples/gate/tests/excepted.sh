# SPDX-License-Identifier: Apache-2.0
# A test that may reach one host, whose name therefore has an address.
set -eu
getent hosts schema.example.com > /dev/null
echo "schema.example.com has an address"
