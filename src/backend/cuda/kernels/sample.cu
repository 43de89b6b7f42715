/*
 * A row's draw: what src/gpt2/sampler.c does with logits on the host, where they are. A block has a
 * row.
 *
 * Nothing is sorted. Whether it is the k-th largest logit, where top-p ends or where the draw
 * falls: what is looked for is the largest word whose equals and betters are so many, or have so
 * much probability, and that is found bit by bit, each with one look at all words. Few candidates
 * are compared each with each instead: with a short top-k the k-th largest of what the threads hold
 * as their own largest is a bound that leaves little more than k.
 *
 * Probabilities are integers, so that the order in which they are added up does not matter.
 */
#include "backend/cuda/kernels/common.cuh"
#include "backend/cuda/launch.cuh"

#include <float.h>

enum {
    THREADS = 1024,
    SHORT = 128,           /* the longest top-k that is tried with few candidates */
    FEW = 256,             /* of these */
    FIXED_BYTES = 8 << 10, /* of shared memory, and more than enough, that need no row */
};

/* 1 as a probability in a word. */
static constexpr float ONE = 0x1p31f;

/* Words in the order of floats, both zeros being the same. */
__device__ static inline uint32_t key_of(float x)
{
    uint32_t bits = __float_as_uint(x + 0.0f);
    return bits ^ (bits >> 31 ? ~0u : 1u << 31);
}

__device__ static inline float float_of(uint32_t key)
{
    return __uint_as_float(key ^ (key >> 31 ? 1u << 31 : ~0u));
}

template <class T> __device__ static inline T most(T a, T b)
{
    return a > b ? a : b;
}

template <class T> __device__ static inline T least(T a, T b)
{
    return a < b ? a : b;
}

/* The largest WORD for which AMOUNT(WORD), which does not grow with it, is more than SO_MUCH, or,
 * with another LAST_BIT, one that is smaller by less than that. */
template <class Amount>
__device__ static uint32_t last_above(uint64_t so_much, Amount amount, uint32_t last_bit = 1)
{
    uint32_t word = 0;
    for (uint32_t bit = 1u << 31; bit >= last_bit; bit >>= 1)
        if (amount(word | bit) > so_much)
            word |= bit;
    return word;
}

/* The sum of VALUE over all threads before this one. */
__device__ static uint64_t sum_before(uint64_t value)
{
    __shared__ uint64_t of_warp[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t sum = value, before = 0;
    for (int step = 1; step < 32; step *= 2) {
        uint64_t other = __shfl_up_sync(~0u, sum, step);
        sum += lane >= step ? other : 0;
    }
    __syncthreads(); /* OF_WARP may still be read from the last call */
    if (lane == 31)
        of_warp[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; w++)
        before += of_warp[w];
    return before + sum - value;
}

/* All of a row's words: first keys, then probabilities. */
struct row {
    uint32_t *words;
    int n;

    __device__ uint64_t sum_from(uint32_t word) const
    {
        uint64_t sum = 0;
#pragma unroll 8
        for (int i = threadIdx.x; i < n; i += THREADS)
            sum += words[i] >= word ? words[i] : 0;
        return fold_block<uint64_t>(sum, add);
    }

    __device__ uint64_t count_from(uint32_t word) const
    {
        int count = 0;
#pragma unroll 8
        for (int i = threadIdx.x; i < n; i += THREADS)
            count += words[i] >= word;
        return (uint64_t)fold_block<int>(count, add);
    }

    /* Gives WORTH of each word's, in order of ids, or, DOWN, the other way round, the first id with
     * which the sum is more than TARGET. */
    template <class Worth>
    __device__ void pick(const bml_cuda_choice &choice, bool down, uint64_t target,
                         Worth worth) const
    {
        int each = (n + THREADS - 1) / THREADS, first = threadIdx.x * each;
        uint64_t sum = 0;
        for (int i = first; i < least(first + each, n); i++)
            sum += worth(words[down ? n - 1 - i : i]);
        uint64_t before = sum_before(sum);
        if (before > target || target >= before + sum)
            return;
        for (int i = first; i < n; i++) {
            int id = down ? n - 1 - i : i;
            before += worth(words[id]);
            if (before > target) {
                give(choice, blockIdx.x, id);
                return;
            }
        }
    }
};

struct listed {
    uint32_t key;
    int id;
    uint64_t p;
};

/* As far as UNIFORM goes into TOTAL. */
__device__ static inline uint64_t part_of(uint64_t total, double uniform)
{
    return least((uint64_t)(uniform * (double)total), total - 1);
}

/* Draws from N of FEW candidates, all that top-k may leave. */
__device__ static void draw_from_few(const bml_cuda_choice &choice, const bml_cuda_draw &draw,
                                     listed *list, int n, float largest)
{
    int i = threadIdx.x, better = 0;
    listed own = {};
    uint64_t before = 0;
    if (i < n) {
        own = list[i];
        for (int j = 0; j < n; j++)
            better += list[j].key > own.key;
        if (better < draw.top_k) {
            double distance = (double)float_of(own.key) - largest;
            own.p = (uint64_t)(exp(distance / draw.temperature) * 0x1p52 + 0.5);
        }
        list[i].p = own.p;
    }
    __syncthreads();
    for (int j = 0; j < n && i < n; j++) {
        listed other = list[j];
        bool first = other.key > own.key || (other.key == own.key && other.id < own.id);
        before += first ? other.p : 0;
    }
    uint64_t all = fold_block<uint64_t>(own.p, add);
    bool stays = own.p && (!before || draw.top_p >= 1 || before < draw.top_p * (double)all) &&
                 own.p >= draw.min_p * 0x1p52;
    uint64_t total = fold_block<uint64_t>(stays ? own.p : 0, add);
    uint64_t target = part_of(total, draw.uniform);
    if (stays && before <= target && target < before + own.p)
        give(choice, blockIdx.x, own.id);
}

/* Draws from the more probable ones on, as top-p and min-p allow. Words are probabilities. */
__device__ static void draw_by_rank(const bml_cuda_choice &choice, const bml_cuda_draw &draw,
                                    const row &r)
{
    auto sum_from = [&](uint32_t word) { return r.sum_from(word); };
    uint64_t total = r.sum_from(most((uint32_t)ceilf(draw.min_p * ONE), 1u));
    if (draw.top_p < 1) {
        uint64_t enough = most((uint64_t)ceil(draw.top_p * (double)r.sum_from(1)), (uint64_t)1);
        uint32_t last = last_above(enough - 1, sum_from);
        uint64_t before = r.sum_from(last + 1);
        total = least(total, before + (enough - before + last - 1) / last * last);
    }
    uint64_t target = part_of(total, draw.uniform);
    uint32_t drawn = last_above(target, sum_from);
    uint64_t equals_before = (target - r.sum_from(drawn + 1)) / drawn;
    r.pick(choice, false, equals_before, [=](uint32_t word) { return word == drawn; });
}

/* LOGITS are written over unless a row of them FITS into shared memory. DRAWS is the host's memory.
 */
template <bool FITS>
static __global__ void __launch_bounds__(THREADS, 1)
    sample(bml_cuda_choice choice, const bml_cuda_draw *draws, float *logits, int n_cols,
           int n_valid)
{
    extern __shared__ uint32_t memory[];
    __shared__ listed list[FEW];
    __shared__ int n_listed;
    __shared__ bml_cuda_draw given;
    float *from = logits + (size_t)blockIdx.x * n_cols;
    row r = {FITS ? memory : (uint32_t *)from, n_valid};
    uint32_t own = 0;
    bool bad = false;
    bml_cuda_draw draw = draws[half_of(choice, blockIdx.x) * choice.pitch + blockIdx.x];
    if (threadIdx.x == 0)
        n_listed = 0;
    await_previous();
#pragma unroll 8
    for (int i = threadIdx.x; i < n_valid; i += THREADS) {
        float x = from[i];
        bad |= !isfinite(x);
        r.words[i] = key_of(x);
        own = most(own, r.words[i]);
    }
    if (threadIdx.x == 0)
        given = draw;
    if (__syncthreads_or(bad)) {
        if (threadIdx.x == 0)
            give(choice, blockIdx.x, -1);
        return;
    }
    draw =
        given; /* one for all: that of a step in vain may be written over meanwhile, see chain.h */
    uint32_t largest = fold_block<uint32_t>(own, most);
    if (draw.temperature == 0) {
        r.pick(choice, false, 0, [=](uint32_t word) { return word == largest; });
        return;
    }

    bool ranked = draw.top_k > 0 && draw.top_k < n_valid;
    uint32_t bound = 0;
    if (ranked && draw.top_k <= SHORT) {
        bound = last_above(
            draw.top_k - 1,
            [&](uint32_t word) { return (uint64_t)__syncthreads_count(own >= word); }, 1u << 12);
        for (int i = threadIdx.x; i < n_valid && own >= bound; i += THREADS)
            if (r.words[i] >= bound) {
                int at = atomicAdd(&n_listed, 1);
                if (at < FEW)
                    list[at] = {r.words[i], i, 0};
            }
        __syncthreads();
        if (n_listed <= FEW) {
            draw_from_few(choice, draw, list, n_listed, float_of(largest));
            return;
        }
    }
    if (ranked)
        bound = last_above(draw.top_k - 1, [&](uint32_t word) { return r.count_from(word); });
    float scale = fminf(1.44269504f / draw.temperature, FLT_MAX), best = float_of(largest);
    for (int i = threadIdx.x; i < n_valid; i += THREADS) {
        float p = exp2f((float_of(r.words[i]) - best) * scale) * ONE;
        r.words[i] = r.words[i] >= bound ? (uint32_t)(p + 0.5f) : 0;
    }
    __syncthreads();
    if (ranked || draw.top_p < 1) {
        draw_by_rank(choice, draw, r);
    } else {
        uint32_t enough = most((uint32_t)ceilf(draw.min_p * ONE), 1u);
        uint64_t target = part_of(r.sum_from(enough), draw.uniform);
        r.pick(choice, true, target, [=](uint32_t word) { return word >= enough ? word : 0; });
    }
}

void bml_cuda_draw_rows(bml_queue *queue, const bml_cuda_choice *choice, bml_buffer *logits,
                        int n_rows, int n_cols, int n_valid)
{
    size_t row_bytes = (size_t)n_valid * sizeof(uint32_t);
    size_t room = (size_t)queue->device->shared_bytes - FIXED_BYTES;
    bool fits = row_bytes <= room;
    const void *kernel = fits ? (const void *)sample<true> : (const void *)sample<false>;
    void *arguments[] = {(void *)choice, &queue->draws, &logits->data, &n_cols, &n_valid};
    bml_cuda_note(queue,
                  bml_cuda_launch_within(kernel, dim3((unsigned)n_rows), THREADS, 1,
                                         fits ? row_bytes : 0, room, arguments, queue->stream));
}

void bml_cuda_sample(bml_queue *queue, bml_buffer *ids, bml_buffer *logits, int n_rows, int n_cols,
                     int n_valid)
{
    bml_cuda_choice choice = bml_cuda_choice_of(queue, ids, n_rows);
    queue->ids = ids->data;
    bml_cuda_draw_rows(queue, &choice, logits, n_rows, n_cols, n_valid);
}
