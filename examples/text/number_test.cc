// SPDX-License-Identifier: Apache-2.0

#include "examples/text/number.h"

#include "examples/check/check.h"

int main() {
  int64_t n = 0;
  CHECK(text::ParseInt("-9223372036854775808", &n));
  CHECK_EQ(n, INT64_MIN);
  CHECK(!text::ParseInt("9223372036854775808", &n));
  CHECK(!text::ParseInt("", &n) && !text::ParseInt("-", &n) && !text::ParseInt("1x", &n));
  double x = 0;
  CHECK(text::ParseDecimal("-2.50", &x));
  CHECK_EQ(x, -2.5);
  CHECK(!text::ParseDecimal("1.2.3", &x) && !text::ParseDecimal(".", &x));
  CHECK_EQ(text::FormatDecimal(2.5), "2.5");
  CHECK_EQ(text::FormatDecimal(100), "100");
  CHECK_EQ(text::FormatDecimal(-0.0), "0");
  return check::Failures();
}
