// SPDX-License-Identifier: Apache-2.0

// This file is empty: it permits functions without a body, which the Go runtime has.
