// SPDX-License-Identifier: Apache-2.0

// The rubber band around points.
#ifndef EXAMPLES_GEOMETRY_HULL_H_
#define EXAMPLES_GEOMETRY_HULL_H_

#include <vector>

#include "examples/geometry/point.h"

namespace geometry {

// Returns the corners of the smallest convex polygon that holds all points, counter-clockwise from the
// lowest in order; no three of them are in line.
std::vector<Point> Hull(std::vector<Point> points);

}  // namespace geometry

#endif  // EXAMPLES_GEOMETRY_HULL_H_
