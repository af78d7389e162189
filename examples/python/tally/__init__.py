# SPDX-License-Identifier: Apache-2.0
"""Counts the words of texts."""

from collections import Counter


def words(text):
    """Returns how often each word of text is in it, the most frequent first and equal ones in order of the alphabet."""
    count = Counter(word.lower() for word in text.split() if word.isalpha())
    return sorted(count.items(), key=lambda item: (-item[1], item[0]))
