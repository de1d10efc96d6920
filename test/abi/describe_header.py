#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Turns mkernel.h into a C program that describes the ABI.

usage: describe_header.py MKERNEL_H OUTPUT_C

The program initialises every struct with its _INIT macro, checks struct_size, and prints one line for each enum
constant, struct size, field (offset, size, type) and function. What the header declares is found here rather than listed
by hand, so that nothing new can be forgotten.
"""
import re
import sys


def describe(header):
    text = header.split('#ifdef MKERNEL_EXAMPLE')[0]
    text = re.sub(r'/\*.*?\*/', ' ', text, flags=re.S)
    initialisers = re.findall(r'#define\s+(MK_\w+_INIT)\b', text)
    text = re.sub(r'#(?:[^\n]*\\\n)*[^\n]*', ' ', text)
    enums = re.findall(r'typedef enum (\w+) \{(.*?)\} \w+;', text, flags=re.S)
    structs = re.findall(r'typedef struct \w+ \{(.*?)\} (\w+);', text, flags=re.S)
    functions = re.findall(r'MK_API\s+([^;]*);', text)

    lines = []
    for name, body in enums:
        for constant in re.findall(r'(MK_\w+)\s*=', body):
            lines.append(f'  printf("enum {name} {constant} = %d\\n", (int){constant});')
    for body, name in structs:
        lines.append(f'  printf("struct {name} size %zu\\n", sizeof({name}));')
        for declaration in filter(None, (field.strip() for field in body.split(';'))):
            field_type, field = re.fullmatch(r'(.*?)(\w+)(?:\[\w+\])*', ' '.join(declaration.split())).groups()
            lines.append(f'  printf("struct {name} field {field} offset %zu size %zu {field_type.strip()}\\n", '
                         f'offsetof({name}, {field}), sizeof((({name} *)0)->{field}));')
        initialiser = 'MK_' + name[len('mk_'):-len('_t')].upper() + '_INIT'
        has_size = re.match(r'\s*size_t struct_size;', body) is not None
        if has_size != (initialiser in initialisers):
            raise SystemExit(f'{name}: a struct begins with struct_size exactly if {initialiser} exists')
        if has_size:
            initialisers.remove(initialiser)
            lines.append(f'  {{ {name} value = {initialiser}; '
                         f'wrong += check("{initialiser}", value.struct_size, offsetof({name}, {field}) + '
                         f'sizeof value.{field}, sizeof value); }}')
    if initialisers:
        raise SystemExit(f'no struct for {", ".join(initialisers)}')
    for function in functions:
        lines.append(f'  printf("function %s\\n", "{" ".join(function.split())}");')
    return '\n'.join([
        '#include "mkernel.h"', '#include <stdio.h>', '',
        # A field added later in the padding at the end would leave struct_size as it was, and go unnoticed.
        'static int check(const char *initialiser, size_t struct_size, size_t end, size_t size) {',
        '  if (struct_size == size && end == size) return 0;',
        '  fprintf(stderr, "%s: struct_size is %zu and the last field ends at %zu, expected %zu\\n",',
        '          initialiser, struct_size, end, size);',
        '  return 1;', '}', '', 'int main(void) {', '  int wrong = 0;', *lines, '  return wrong != 0;', '}', ''])


if __name__ == '__main__':
    with open(sys.argv[1], encoding='utf-8') as source:
        program = describe(source.read())
    with open(sys.argv[2], 'w', encoding='utf-8') as output:
        output.write(program)
