/* The parts of the CPU backend that do not depend on the instruction set; see backend.h. */
#ifndef BML_BACKEND_CPU_DEVICE_H
#define BML_BACKEND_CPU_DEVICE_H

#include "backend/cpu/cpu.h"

bml_status bml_cpu_open(bml_device **device, bml_error *err);
void bml_cpu_close(bml_device *device);

/* Weights in a row-major format: mapped as they are, or converted. */
bml_status bml_cpu_weight_rows(bml_device *device, const bml_matrix *matrix, bool out_in,
                               bml_weight_format format, bml_weight *weight, bml_error *err);

/* Memory for a weight that is not used as the file has it, zeroed and aligned to 64 bytes, and the
 * pool that fills it. */
bml_status bml_cpu_weight_memory(bml_device *device, size_t bytes, bml_buffer *buffer,
                                 bml_pool **pool, bml_error *err);
void bml_cpu_weight_memory_free(bml_device *device, bml_buffer *buffer);

/* Notes the width of a weight that kernels may meet. */
void bml_cpu_device_note(bml_device *device, const bml_weight *weight);

void bml_cpu_weight_free(bml_device *device, bml_weight *weight);
bml_status bml_cpu_buffer_new(bml_device *device, size_t bytes, bml_buffer *buffer, bml_error *err);
void bml_cpu_buffer_free(bml_device *device, bml_buffer *buffer);
bml_status bml_cpu_queue_new(bml_device *device, int n_threads, bml_queue **queue, bml_error *err);
void bml_cpu_queue_free(bml_queue *queue);
int bml_cpu_queue_threads(const bml_queue *queue);
bml_status bml_cpu_upload(bml_queue *queue, bml_buffer *to, const void *from, size_t bytes,
                          bml_error *err);
bml_status bml_cpu_download(bml_queue *queue, void *to, const bml_buffer *from, size_t bytes,
                            bml_error *err);
bml_status bml_cpu_begin(bml_queue *queue, const bml_batch *batch, bml_error *err);
bml_status bml_cpu_end(bml_queue *queue, bml_error *err);

#endif
