#!/bin/sh
# SPDX-License-Identifier: MIT
# The header alone, and every _INIT macro, as C99 and as C++17.
# usage: check_header.sh MKERNEL_H DESCRIPTION_C COMPILER...
set -eu
header=$1
description=$2
shift 2
directory=$(dirname "$header")
for language in 'c -std=c99' 'c++ -std=c++17'; do
  for source in "$header" "$description"; do
    # shellcheck disable=SC2086 # the language is two words
    "$@" -x $language -Wall -Wextra -pedantic -Werror -fsyntax-only -I"$directory" "$source"
  done
  echo "$* -x $language: no warning"
done
