// SPDX-License-Identifier: Apache-2.0

#include "examples/units/convert.h"

#include "examples/check/check.h"

int main() {
  units::Unit from = units::kMetre, to = units::kMetre;
  CHECK(units::Find("mi", &from) && from == units::kMile);
  CHECK(units::Find("km", &to) && to == units::kKilometre);
  CHECK(!units::Find("parsec", &to));
  double x = 0;
  CHECK(units::Convert(2, from, to, &x));
  CHECK_EQ(x, 3.218688);
  CHECK(!units::Convert(2, units::kMile, units::kHour, &x));
  CHECK_EQ(x, 3.218688);
  return check::Failures();
}
