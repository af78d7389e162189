// SPDX-License-Identifier: Apache-2.0

// Package pagestyle is the style of all HTML that Cloister makes: reports and the pages of the web console.
package pagestyle

import _ "embed"

// CSS is the style sheet. It has a light and a dark theme.
//
//go:embed style.css
var CSS string
