# SPDX-License-Identifier: Apache-2.0
"""Counts the words of texts."""

from collections import Counter


def words(text):
    """Returns the words of text with their counts, most frequent first, equal counts in alphabetical order."""
    count = Counter(word.lower() for word in text.split() if word.isalpha())
    return sorted(count.items(), key=lambda item: (-item[1], item[0]))
