// SPDX-License-Identifier: Apache-2.0

// Convex hulls.
#ifndef EXAMPLES_GEOMETRY_HULL_H_
#define EXAMPLES_GEOMETRY_HULL_H_

#include <vector>

#include "examples/geometry/point.h"

namespace geometry {

// Returns the corners of the smallest convex polygon that contains all points, counter-clockwise from the
// lowest point; no three of them are collinear.
std::vector<Point> Hull(std::vector<Point> points);

}  // namespace geometry

#endif  // EXAMPLES_GEOMETRY_HULL_H_
