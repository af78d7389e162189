// SPDX-License-Identifier: Apache-2.0

#include "examples/geometry/polygon.h"

#include "examples/check/check.h"

int main() {
  const geometry::Polygon notched = {{0, 0}, {6, 0}, {6, 6}, {3, 3}, {0, 6}};
  CHECK_EQ(geometry::TwiceArea(notched), 54);
  CHECK(geometry::Contains(notched, {1, 1}));
  CHECK(geometry::Contains(notched, {3, 3}));
  CHECK(!geometry::Contains(notched, {3, 4}));
  CHECK(!geometry::Contains(notched, {7, 0}));
  CHECK_EQ(geometry::TwiceArea({}), 0);
  return check::Failures();
}
