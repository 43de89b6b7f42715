/* Where the token that a pass chooses for a row goes. */
#ifndef BML_BACKEND_CUDA_CHOICE_H
#define BML_BACKEND_CUDA_CHOICE_H

#include <stdint.h>

typedef struct bml_cuda_choice {
    int32_t *ids; /* [rows] */
    /* Pinned memory of the host, [2][pitch], or NULL. A step that another can follow writes the
     * half that its row's position names, even or odd, so that both can be on their way. */
    int32_t *host;
    int pitch;
    /* Where there is no POSITION: of rows 0 to 31, those that have the second half, of these ids
     * and of the queue's draws. */
    uint32_t odd;
    /* Of such a step the batch's arrays on the device, which become those of the step that takes
     * the chosen tokens; else NULL. */
    int32_t *token, *position;
} bml_cuda_choice;

#ifdef __CUDACC__
/* The half, 0 or 1, that is row ROW's. */
__device__ static inline int half_of(const bml_cuda_choice &c, int row)
{
    return c.position ? c.position[row] & 1 : row < 32 ? c.odd >> row & 1 : 0;
}

/* Says that row ROW has chosen ID. The kernels that read the batch have ended. */
__device__ static inline void give(const bml_cuda_choice &c, int row, int id)
{
    int half = half_of(c, row);
    c.ids[row] = id;
    if (c.position) {
        c.position[row]++;
        c.token[row] = max(id, 0); /* -1 fails the pass: nobody asks for what follows */
    }
    if (c.host)
        c.host[half * c.pitch + row] = id;
}
#endif

#endif
