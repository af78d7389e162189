// SPDX-License-Identifier: Apache-2.0

#include "examples/text/distance.h"

#include "examples/check/check.h"

int main() {
  CHECK_EQ(text::Distance("kitten", "sitting"), 3);
  CHECK_EQ(text::Distance("", "abc"), 3);
  CHECK_EQ(text::Distance("same", "same"), 0);
  return check::Failures();
}
