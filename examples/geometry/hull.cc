// SPDX-License-Identifier: Apache-2.0

#include "examples/geometry/hull.h"

#include <algorithm>

namespace geometry {

std::vector<Point> Hull(std::vector<Point> points) {
  std::sort(points.begin(), points.end());
  points.erase(std::unique(points.begin(), points.end()), points.end());
  if (points.size() < 3) return points;
  // Andrew's monotone chain: the lower side from left to right, then the upper one back.
  std::vector<Point> hull;
  for (int side = 0; side < 2; side++) {
    const size_t start = hull.size();
    for (Point p : points) {
      while (hull.size() >= start + 2 && Turn(hull[hull.size() - 2], hull.back(), p) <= 0) hull.pop_back();
      hull.push_back(p);
    }
    hull.pop_back();  // the first of the other side
    std::reverse(points.begin(), points.end());
  }
  return hull;
}

}  // namespace geometry
