/* SPDX-License-Identifier: MIT */
/* What the examples have in common: the ranks of a job, which any launcher starts as processes with MK_RANK and
 * MK_NRANKS set, and who learn the id of their communicator from a file. */
#ifndef JOB_H
#define JOB_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "mkernel.h"

static int environment_number(const char* name, int otherwise) {
  const char* const text = getenv(name);
  return text ? atoi(text) : otherwise;
}

/* Prints what a failed call says; 0: it has not failed. */
static int check(mk_status_t status, const char* what, mk_comm_t comm) {
  if (status == MK_SUCCESS) return 0;
  fprintf(stderr, "%s: %s: %s\n", what, mk_status_string(status), mk_get_last_error(comm));
  return 1;
}

/* Rank 0 makes the id and leaves it at `path`, the others wait for it there for a minute; 0: it is known. */
static int share_id(const char* path, int rank, mk_unique_id_t* id) {
  char part[4096];
  FILE* file;
  int tries;
  if (rank == 0) {
    if (check(mk_get_unique_id(id), "mk_get_unique_id", NULL)) return 1;
    snprintf(part, sizeof part, "%s.part", path);
    file = fopen(part, "wb");
    return !file || fwrite(id, sizeof *id, 1, file) != 1 || fclose(file) || rename(part, path);
  }
  for (tries = 0; tries < 600; ++tries) {
    file = fopen(path, "rb");
    if (file) {
      const int got = fread(id, sizeof *id, 1, file) == 1;
      fclose(file);
      return !got;
    }
    usleep(100000);
  }
  return 1;
}

static uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#endif
