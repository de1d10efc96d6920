#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks that what the documents link to is there: files, and headings of documents.

usage: check_links.py PROJECT
"""
import pathlib
import re
import sys


def documents(root):
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def anchor(heading):
    """As GitHub makes it: of a heading's letters, digits, hyphens, underscores and spaces."""
    kept = "".join(letter for letter in heading.strip().lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


def anchors(document):
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", document.read_text(), re.M)}


def broken_links(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, heading = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists():
            yield f"{link}: expected a file {target}, saw none"
        elif heading and heading not in anchors(target):
            yield f"{link}: expected a heading #{heading} in {target}, saw none"


def main():
    root = pathlib.Path(sys.argv[1])
    broken = [f"{document.relative_to(root)}: {what}" for document in documents(root) for what in broken_links(document)]
    print("\n".join(broken) or f"{len(documents(root))} documents, all links good")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
