/* Memory that a thread keeps from call to call. */

#ifndef SSD_SCRATCH_H
#define SSD_SCRATCH_H

#include <stdlib.h>

/* Scratch of the calling thread for `count` floats, aligned to 64 bytes, grown as needed and kept. */
static float *scratch(size_t count) {
    static __thread float *memory;
    static __thread size_t size;
    if (size < count) {
        free(memory);
        size = count + count / 2;
        if (posix_memalign((void **)&memory, 64, size * sizeof(float))) abort();
    }
    return memory;
}

#endif
