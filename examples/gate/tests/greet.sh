# SPDX-License-Identifier: Apache-2.0
echo "hello, $1"
