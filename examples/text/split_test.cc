// SPDX-License-Identifier: Apache-2.0

#include "examples/text/split.h"

#include "examples/check/check.h"

int main() {
  CHECK_EQ(text::Split("a,,b", ',').size(), 3u);
  CHECK(text::Split("a,,b", ',')[1].empty());
  CHECK_EQ(text::Split("", ',').size(), 1u);
  const auto words = text::Words("  one\ttwo \n");
  CHECK_EQ(words.size(), 2u);
  CHECK(words[1] == "two");
  return check::Failures();
}
