/* Files that appear under their name only once they are complete. */
#ifndef BML_FORMATS_OUTPUT_FILE_H
#define BML_FORMATS_OUTPUT_FILE_H

#include "bml.h"

/* {0} is closed. */
typedef struct bml_output_file {
    int fd;
    const char *path; /* the caller's, as long as the file is open */
    char *temporary;  /* NULL once closed */
    char *block;      /* what has not been written yet, FILLED bytes */
    size_t filled;
} bml_output_file;

/* Opens a temporary file beside PATH. */
bml_status bml_output_open(bml_output_file *file, const char *path, bml_error *err);
bml_status bml_output_write(bml_output_file *file, const void *data, size_t size, bml_error *err);

/* Closes the file and gives it its name, in place of what was there. */
bml_status bml_output_commit(bml_output_file *file, bml_error *err);

/* Removes a file that was not committed; nothing to do for one that was, or was never opened. */
void bml_output_abandon(bml_output_file *file);

/* Makes PATH and the directories above it where they are missing; *MADE tells if PATH was. */
bml_status bml_make_directory(const char *path, bool *made, bml_error *err);

#endif
