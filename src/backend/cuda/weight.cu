/* Weights on their way to the device: turned to [n_out, n_in], converted, or quantised by the CPU
 * backend and laid out in rows; see weight.h. */
#include "backend/cuda/kernels/common.cuh"

extern "C" {
#include "base/dtype.h"
#include "base/error.h"
}

/* Device memory for the length of a scope. */
struct staging {
    void *data = nullptr;
    ~staging()
    {
        cudaFree(data);
    }
};

enum { SQUARE = 32, SQUARE_ROWS = 8 };

/* to [cols, rows] = from [rows, cols], through squares in shared memory. */
template <class To, class From>
static __global__ void transpose(To *to, const From *from, size_t rows, size_t cols)
{
    __shared__ float square[SQUARE][SQUARE + 1];
    size_t x = (size_t)blockIdx.x * SQUARE + threadIdx.x;
    for (int i = threadIdx.y; i < SQUARE; i += SQUARE_ROWS) {
        size_t y = (size_t)blockIdx.y * SQUARE + i;
        if (x < cols && y < rows)
            square[i][threadIdx.x] = to_float(from[y * cols + x]);
    }
    __syncthreads();
    x = (size_t)blockIdx.y * SQUARE + threadIdx.x;
    for (int i = threadIdx.y; i < SQUARE; i += SQUARE_ROWS) {
        size_t y = (size_t)blockIdx.x * SQUARE + i;
        if (x < rows && y < cols)
            from_float(to + y * rows + x, square[threadIdx.x][i]);
    }
}

template <class To, class From> static __global__ void convert(To *to, const From *from, size_t n)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        from_float(to + i, to_float(from[i]));
}

template <class P> using element_of = std::remove_const_t<std::remove_pointer_t<P>>;

static void convert_on_device(void *to, bml_dtype to_dtype, const void *from,
                              const bml_matrix *matrix, bool turn)
{
    size_t rows = (size_t)matrix->rows, cols = (size_t)matrix->cols;
    with_type(to_dtype, [&](auto t) {
        with_type(matrix->dtype, [&](auto f) {
            typedef element_of<decltype(t)> To;
            typedef element_of<decltype(f)> From;
            if (turn)
                transpose<<<dim3(blocks_for(cols, SQUARE), blocks_for(rows, SQUARE)),
                            dim3(SQUARE, SQUARE_ROWS)>>>((To *)to, (const From *)from, rows, cols);
            else
                convert<<<blocks_for(rows * cols, 256), 256>>>((To *)to, (const From *)from,
                                                               rows * cols);
        });
    });
}

/* To be called behind a launch: waits for the default stream. Every way into a weight ends with
 * such a wait: sessions' streams do not wait for this one, and a copy from pageable memory may
 * return before it has arrived. */
static cudaError_t finish(void)
{
    cudaError_t error = cudaGetLastError();
    return error ? error : cudaStreamSynchronize(0);
}

static bml_status fail(bml_error *err, bml_weight *w, cudaError_t error)
{
    cudaFree(w->buffer.data);
    return bml_cuda_fail(err, error, w->buffer.bytes, "weights");
}

static bml_status float_rows(const bml_matrix *matrix, bool out_in, bml_weight *w, bml_error *err)
{
    size_t n = (size_t)matrix->rows * (size_t)matrix->cols;
    size_t file_bytes = n * bml_dtype_size(matrix->dtype);
    bool turn = !out_in && matrix->rows > 1 && matrix->cols > 1;
    cudaError_t error = cudaMalloc(&w->buffer.data, w->buffer.bytes);
    if (!turn && matrix->dtype == w->dtype) {
        if (!error)
            error = cudaMemcpy(w->buffer.data, matrix->data, file_bytes, cudaMemcpyHostToDevice);
        if (!error)
            error = cudaStreamSynchronize(0);
        return error ? fail(err, w, error) : BML_OK;
    }
    staging file;
    if (!error)
        error = cudaMalloc(&file.data, file_bytes);
    if (!error)
        error = cudaMemcpy(file.data, matrix->data, file_bytes, cudaMemcpyHostToDevice);
    if (!error) {
        convert_on_device(w->buffer.data, w->dtype, file.data, matrix, turn);
        error = finish();
    }
    return error ? fail(err, w, error) : BML_OK;
}

/* ---- packed: from the CPU's tiles to rows
 * ------------------------------------------------------*/

/* A thread moves a block's scales or one of its words of weights; see both formats' descriptions.
 */
static __global__ void rows_of_tiles(char *rows, const char *tiles, bml_weight_format format,
                                     size_t n_in, size_t n_out, size_t tile_bytes, size_t header)
{
    size_t n_blocks = bml_cuda_n_blocks(n_in), words = bml_cuda_block_bytes(format) / 4;
    size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    size_t word = at % (words + 1), b = at / (words + 1) % n_blocks,
           o = at / (words + 1) / n_blocks;
    if (o >= n_out)
        return;
    const char *tile = tiles + o / 16 * tile_bytes;
    const uint32_t *q = (const uint32_t *)(tile + header) + b * words * 16 + o % 16;
    size_t row_bytes = bml_cuda_row_bytes(format, n_in);
    char *row = rows + o * row_bytes, *scales = row + bml_cuda_scales_at(format, b);
    if (format == BML_WEIGHTS_Q8) {
        const uint16_t *from = (const uint16_t *)tile;
        if (word == words)
            ((uint16_t *)scales)[b % BML_CUDA_GROUP] = from[b * 16 + o % 16];
        else /* byte - 128 is byte with its highest bit turned */
            ((uint32_t *)(row + bml_cuda_block_at(format, b)))[word] = q[word * 16] ^ 0x80808080u;
        return;
    }
    if (word == words) {
        const int8_t *from = (const int8_t *)tile + 16 * sizeof(float);
        for (size_t half = 0; half < 2; half++)
            scales[b % BML_CUDA_GROUP * 2 + half] = from[(b * 2 + half) * 16 + o % 16];
        if (b == 0)
            ((float *)(rows + n_out * row_bytes))[o] = ((const float *)tile)[o % 16];
        return;
    }
    uint32_t from = q[word * 16], nibbles = 0; /* inputs 8 word .. 8 word + 7: 4h + c is WORD */
    for (int j = 0; j < 8; j++)
        nibbles |= (from >> (j % 4 * 8 + j / 4 * 4) & 15) << 4 * j;
    ((uint32_t *)(row + bml_cuda_block_at(format, b)))[word % 4 * 2 + word / 4] = nibbles;
}

static bml_status packed_rows(bml_device *device, const bml_matrix *matrix, bool out_in,
                              bml_weight *w, bml_error *err)
{
    const bml_backend *cpu = bml_backend_cpu();
    bml_weight tiles;
    bml_status status = device->packer ? BML_OK : cpu->open(&device->packer, err);
    if (!status)
        status = cpu->weight_new(device->packer, matrix, out_in, w->format, &tiles, err);
    if (status)
        return status;
    staging s;
    size_t n_in = (size_t)w->n_in, n_out = (size_t)w->n_out;
    size_t threads = n_out * bml_cuda_n_blocks(n_in) * (bml_cuda_block_bytes(w->format) / 4 + 1);
    cudaError_t error = cudaMalloc(&w->buffer.data, w->buffer.bytes);
    if (!error)
        error = cudaMemset(w->buffer.data, 0, w->buffer.bytes);
    if (!error)
        error = cudaMalloc(&s.data, tiles.buffer.bytes);
    if (!error)
        error = cudaMemcpy(s.data, tiles.buffer.data, tiles.buffer.bytes, cudaMemcpyHostToDevice);
    if (!error) {
        rows_of_tiles<<<blocks_for(threads, 256), 256>>>(
            (char *)w->buffer.data, (const char *)s.data, w->format, n_in, n_out,
            bml_tile_bytes(w->format, n_in), bml_tile_header(w->format, n_in));
        error = finish();
    }
    cpu->weight_free(device->packer, &tiles);
    return error ? fail(err, w, error) : BML_OK;
}

bml_status bml_cuda_weight_new(bml_device *device, const bml_matrix *matrix, bool out_in,
                               bml_weight_format format, bml_weight *weight, bml_error *err)
{
    bml_weight w = {};
    w.dtype = format == BML_WEIGHTS_F32    ? BML_F32
              : format == BML_WEIGHTS_BF16 ? BML_BF16
              : format == BML_WEIGHTS_F16  ? BML_F16
                                           : matrix->dtype;
    w.format = bml_cuda_packed(format) ? format
               : w.dtype == BML_F32    ? BML_WEIGHTS_F32
               : w.dtype == BML_BF16   ? BML_WEIGHTS_BF16
                                       : BML_WEIGHTS_F16;
    w.n_in = out_in ? matrix->cols : matrix->rows;
    w.n_out = out_in ? matrix->rows : matrix->cols;
    w.out_in = w.owned = true;
    w.buffer.bytes = bml_cuda_weight_bytes(w.format, (size_t)w.n_in, (size_t)w.n_out);
    bml_status status = bml_cuda_packed(format) ? packed_rows(device, matrix, out_in, &w, err)
                                                : float_rows(matrix, out_in, &w, err);
    if (status)
        return status;
    if ((size_t)w.n_in > device->max_width)
        device->max_width = (size_t)w.n_in;
    *weight = w;
    return BML_OK;
}

void bml_cuda_weight_free(bml_device *device, bml_weight *weight)
{
    (void)device;
    if (weight->owned)
        cudaFree(weight->buffer.data);
    *weight = {};
}
