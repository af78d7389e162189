# SPDX-License-Identifier: Apache-2.0

"""The name of rules_shell's test rule for a Bazel whose shell rules are built in (4 to 8)."""

sh_test = native.sh_test
