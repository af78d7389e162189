// SPDX-License-Identifier: Apache-2.0

// Points of the integer grid, so that every answer is exact.
#ifndef EXAMPLES_GEOMETRY_POINT_H_
#define EXAMPLES_GEOMETRY_POINT_H_

#include <cstddef>
#include <cstdint>

namespace geometry {

struct Point {
  int64_t x = 0, y = 0;
  bool operator==(Point o) const { return x == o.x && y == o.y; }
  bool operator<(Point o) const { return x != o.x ? x < o.x : y < o.y; }
};

// Returns twice the area of the triangle abc: positive if it turns left, 0 if it is flat.
constexpr int64_t Turn(Point a, Point b, Point c) {
  return (b.x - a.x) * (c.y - a.y) - (b.y - a.y) * (c.x - a.x);
}

}  // namespace geometry

#endif  // EXAMPLES_GEOMETRY_POINT_H_
