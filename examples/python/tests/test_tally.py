# SPDX-License-Identifier: Apache-2.0

import sys
import unittest

import tally


class Words(unittest.TestCase):
    def test_counts_words_in_a_fixed_order(self):
        self.assertEqual(tally.words("b a B c 7 a"), [("a", 2), ("b", 2), ("c", 1)])

    def test_nothing_has_no_words(self):
        self.assertEqual(tally.words(""), [])

    def test_package_comes_from_the_environment(self):
        self.assertTrue(tally.__file__.startswith(sys.prefix), tally.__file__)
        self.assertNotEqual(sys.prefix, sys.base_prefix)


if __name__ == "__main__":
    unittest.main()
