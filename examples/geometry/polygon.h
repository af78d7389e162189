// SPDX-License-Identifier: Apache-2.0

// Closed chains of segments.
#ifndef EXAMPLES_GEOMETRY_POLYGON_H_
#define EXAMPLES_GEOMETRY_POLYGON_H_

#include <vector>

#include "examples/geometry/point.h"

namespace geometry {

// The corners of a polygon, in order.
using Polygon = std::vector<Point>;

// Returns twice the area of p: negative if it runs clockwise.
int64_t TwiceArea(const Polygon& p);

// Reports whether q is inside p or on its border.
bool Contains(const Polygon& p, Point q);

}  // namespace geometry

#endif  // EXAMPLES_GEOMETRY_POLYGON_H_
