// SPDX-License-Identifier: Apache-2.0

#include "examples/text/join.h"

#include "examples/check/check.h"

int main() {
  CHECK_EQ(text::Join({"a", "b", "c"}, ", "), "a, b, c");
  CHECK_EQ(text::Join({"a"}, ", "), "a");
  CHECK_EQ(text::Join({}, ", "), "");
  return check::Failures();
}
