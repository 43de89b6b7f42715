/* Which kernel multiplies by which weights, and for how many tokens. */
#include "backend/metal/metal.h"

#include "backend/cpu/quant.h"

#include <limits.h>
#include <string.h>

weight_layout bml_metal_layout(const bml_weight *w)
{
    weight_layout layout = {
        .n_in = (uint32_t)w->n_in, .n_out = (uint32_t)w->n_out, .out_in = w->out_in};
    if (bml_is_packed(w->format)) {
        layout.format = w->format == BML_WEIGHTS_Q8 ? FORMAT_Q8 : FORMAT_Q4;
        layout.tile_bytes = (uint32_t)bml_tile_bytes(w->format, (size_t)w->n_in);
        layout.tile_header = (uint32_t)bml_tile_header(w->format, (size_t)w->n_in);
        memcpy(layout.levels, bml_q4_levels, sizeof layout.levels);
        return layout;
    }
    uint32_t row = w->out_in ? layout.n_in : layout.n_out, element = w->dtype == BML_F32 ? 4 : 2;
    layout.format = (uint32_t)w->dtype;
    layout.wide = row % 4 == 0 && (uintptr_t)w->buffer.data % (4 * element) == 0;
    return layout;
}

/* What a kernel asks of weights. */
typedef enum demand { WIDE_ROWS, WIDE_DOTS, PACKED, ANY, PLAIN_ROWS, PLAIN_DOTS } demand;

typedef struct variant {
    int most_tokens;
    demand demand;
    bml_metal_kernel kernel;
    bool norm, epilogue; /* what it takes in besides the product */
} variant;

/*
 * The first that fits is used. One token: weights pass by once, and the vector kernels read them
 * fastest. From two to eight tokens that is still so, and the smallest tile does the arithmetic on
 * the side; beyond, more tokens share each load of a weight. None of these crossovers has been
 * measured on Apple hardware yet.
 */
static const variant variants[] = {
    {1, WIDE_ROWS, BML_METAL_VECTOR_ROWS, true, true},
    {1, WIDE_DOTS, BML_METAL_VECTOR_DOTS, true, true},
    {1, PACKED, BML_METAL_VECTOR_PACKED, true, true},
    {8, ANY, BML_METAL_TILE_8, false, true},
    {INT_MAX, ANY, BML_METAL_TILE_32, false, true},
    {INT_MAX, PLAIN_ROWS, BML_METAL_LINEAR, false, false},
    {INT_MAX, PLAIN_DOTS, BML_METAL_LINEAR_TRANSPOSED, false, false},
    {INT_MAX, PACKED, BML_METAL_LINEAR_PACKED, false, false},
};

/* Inputs that a vector kernel keeps in threadgroup memory: whole blocks of packed weights. */
static size_t staged_floats(const bml_weight *w)
{
    return SCRATCH_FLOATS + bml_n_blocks((size_t)w->n_in) * BML_BLOCK;
}

static bool fits(const variant *v, const bml_queue *queue, const weight_layout *layout,
                 size_t staged)
{
    enum { MOST_STAGED = (32768 - 64) / sizeof(float) }; /* beside Q4's levels */
    bool packed = layout->format >= FORMAT_Q8, fast = !queue->plain;
    switch (v->demand) {
    case WIDE_ROWS:
        return fast && !packed && layout->wide && !layout->out_in && staged <= MOST_STAGED;
    case WIDE_DOTS:
        return fast && !packed && layout->wide && layout->out_in && staged <= MOST_STAGED;
    case PACKED:
        return packed && (v->kernel == BML_METAL_LINEAR_PACKED || (fast && staged <= MOST_STAGED));
    case ANY:
        return fast && queue->device->has_matrices;
    case PLAIN_ROWS:
        return !packed && !layout->out_in;
    default:
        return !packed;
    }
}

static const variant *choose(const bml_queue *queue, const bml_weight *w, int n_tokens)
{
    weight_layout layout = bml_metal_layout(w);
    const variant *v = variants;
    while (n_tokens > v->most_tokens || !fits(v, queue, &layout, staged_floats(w)))
        v++; /* the plain ones fit whatever there is */
    return v;
}

bool bml_metal_takes_norm(const bml_queue *queue, const bml_weight *w, int n_tokens)
{
    return choose(queue, w, n_tokens)->norm;
}

bool bml_metal_takes_epilogue(const bml_queue *queue, const bml_weight *w, int n_tokens)
{
    return choose(queue, w, n_tokens)->epilogue;
}

static size_t divide_up(size_t n, size_t by)
{
    return (n + by - 1) / by;
}

/* Threadgroups and their memory. */
static void size_call(bml_metal_call *call, const bml_weight *w, size_t n_tokens)
{
    size_t n_out = (size_t)w->n_out, rows = call->kernel == BML_METAL_TILE_8 ? 8 : 32;
    switch (call->kernel) {
    case BML_METAL_VECTOR_PACKED:
        call->memory[1] = 16; /* Q4's levels */
        /* fall through */
    case BML_METAL_VECTOR_ROWS:
    case BML_METAL_VECTOR_DOTS:
        call->memory[0] = staged_floats(w);
        call->n_groups = divide_up(n_out, VECTOR_OUTPUTS);
        break;
    case BML_METAL_TILE_8:
    case BML_METAL_TILE_32: /* inputs and weights; the results, which follow them, are fewer */
        call->memory[0] = (rows + TILE_OUTPUTS) * TILE_INPUTS;
        call->n_groups = divide_up(n_tokens, rows) * divide_up(n_out, TILE_OUTPUTS);
        break;
    default:
        call->n_groups = bml_metal_groups_for(call->kernel, n_tokens * n_out);
    }
}

void bml_metal_multiply(bml_queue *queue, const bml_metal_product *p)
{
    const variant *v = choose(queue, p->w, p->n_tokens);
    const bml_buffer *norm_weight = p->norm ? &p->norm->weight.buffer : NULL;
    const bml_buffer *norm_bias = p->norm ? &p->norm->bias.buffer : NULL;
    product_args args = {.w = bml_metal_layout(p->w),
                         .n_tokens = (uint32_t)p->n_tokens,
                         .has_bias = p->bias->data != NULL,
                         .has_norm = p->norm != NULL,
                         .epilogue = (uint32_t)p->epilogue,
                         .activation = (uint32_t)p->activation};
    if (p->norm)
        args.norm = (norm_args){
            .n = (uint32_t)p->w->n_in, .has_bias = norm_bias->data != NULL, .epsilon = p->epsilon};
    bml_metal_call call = {.kernel = v->kernel,
                           .format = v->epilogue ? args.w.format : 0, /* the plain ones are told */
                           .buffers = {{p->out, 0},
                                       {p->x, 0},
                                       {&p->w->buffer, 0},
                                       {p->bias, 0},
                                       {norm_weight, 0},
                                       {norm_bias, 0}},
                           .n_buffers = v->norm ? 6 : 4,
                           .args = &args,
                           .args_bytes = sizeof args};
    size_call(&call, p->w, (size_t)p->n_tokens);
    bml_metal_dispatch(queue, &call);
}

void bml_metal_linear(bml_queue *queue, bml_buffer *out, const bml_buffer *x, const bml_weight *w,
                      const bml_buffer *bias, int n_tokens)
{
    bml_metal_multiply(queue, &(bml_metal_product){
                                  .out = out, .x = x, .bias = bias, .w = w, .n_tokens = n_tokens});
}
