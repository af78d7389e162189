// SPDX-License-Identifier: Apache-2.0

#include "examples/text/wrap.h"

#include "examples/check/check.h"

int main() {
  CHECK_EQ(text::Wrap("a bb ccc dddd", 4), "a bb\nccc\ndddd");
  CHECK_EQ(text::Wrap("unbreakable no", 5), "unbreakable\nno");
  CHECK_EQ(text::Wrap("   ", 5), "");
  return check::Failures();
}
