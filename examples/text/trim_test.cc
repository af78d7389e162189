// SPDX-License-Identifier: Apache-2.0

#include "examples/text/trim.h"

#include "examples/check/check.h"

int main() {
  CHECK(text::Trim("  a b\t\n") == "a b");
  CHECK(text::Trim(" \r\n ").empty());
  CHECK(text::Trim("").empty());
  return check::Failures();
}
