// SPDX-License-Identifier: Apache-2.0

#include "examples/text/utf8.h"

#include "examples/check/check.h"

int main() {
  std::string_view euro = "\xE2\x82\xAC!";
  CHECK_EQ(text::TakeRune(&euro), 0x20AC);
  CHECK(euro == "!");
  CHECK(!text::ValidUtf8("\xC0\xAF"));          // overlong
  CHECK(!text::ValidUtf8("\xED\xA0\x80"));      // surrogate
  CHECK(!text::ValidUtf8("\xF4\x90\x80\x80"));  // beyond the last code point
  CHECK(!text::ValidUtf8("\xE2\x82"));          // cut short
  CHECK_EQ(text::CountRunes("na\xC3\xAFve"), 5);
  return check::Failures();
}
