// SPDX-License-Identifier: Apache-2.0

// Random polygons.
#ifndef EXAMPLES_GEOMETRY_SPREAD_H_
#define EXAMPLES_GEOMETRY_SPREAD_H_

#include <cstdint>

#include "examples/geometry/polygon.h"

namespace geometry {

// Returns the hull of n points of the square from (0, 0) to (size-1, size-1); the same for the same seed.
Polygon RandomConvex(uint64_t seed, int n, int64_t size);

}  // namespace geometry

#endif  // EXAMPLES_GEOMETRY_SPREAD_H_
