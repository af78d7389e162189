// SPDX-License-Identifier: Apache-2.0

#include "examples/text/ascii.h"

#include "examples/check/check.h"

int main() {
  CHECK(text::IsDigit('7') && !text::IsDigit('x'));
  CHECK(text::IsLetter('q') && text::IsLetter('Q') && !text::IsLetter('@'));
  CHECK(text::IsSpace('\n') && text::IsSpace('\v') && !text::IsSpace('_'));
  CHECK_EQ(text::ToUpper('z'), 'Z');
  CHECK_EQ(text::ToLower('['), '[');
  return check::Failures();
}
