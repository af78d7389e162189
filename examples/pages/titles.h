// SPDX-License-Identifier: Apache-2.0

// The headings of the handbook; their definitions are generated from it.
#ifndef EXAMPLES_PAGES_TITLES_H_
#define EXAMPLES_PAGES_TITLES_H_

namespace pages {

const char* Title1();
const char* Title2();
const char* Title3();

}  // namespace pages

#endif  // EXAMPLES_PAGES_TITLES_H_
