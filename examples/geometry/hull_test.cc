// SPDX-License-Identifier: Apache-2.0

#include "examples/geometry/hull.h"

#include "examples/check/check.h"

using geometry::Hull;
using geometry::Point;

int main() {
  const std::vector<Point> square = {{0, 0}, {4, 0}, {4, 4}, {0, 4}};
  CHECK(Hull({{2, 2}, {4, 4}, {0, 4}, {2, 0}, {0, 0}, {4, 0}, {1, 3}, {0, 0}}) == square);
  CHECK_EQ(Hull({{0, 0}, {1, 1}, {2, 2}}).size(), 2u);
  CHECK_EQ(Hull({{5, 5}, {5, 5}}).size(), 1u);
  return check::Failures();
}
